"""Files with a wrong bit."""

from pathlib import Path


def flip(path: Path, share: float = 0.5) -> None:
    """Changes one bit at a share of a file's length. Done twice, the file is as it was."""
    content = bytearray(path.read_bytes())
    content[int(share * (len(content) - 1))] ^= 1
    path.write_bytes(content)
