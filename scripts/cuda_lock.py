"""`make check-cuda-lock`: compares scripts/requirements-cuda.txt with what the package index resolves to for GPU machines.

It needs no GPU and downloads no wheel of torch or vLLM: uv reads the metadata inside the wheels with range requests. It resolves
for each of PYTHONS on Linux x86-64, with the pins of the file as preferences: newer releases change nothing, but a pin that
another package contradicts moves, one that is missing appears, and one that nothing needs disappears. The packages come from
pip's configured index (pip.conf or PIP_INDEX_URL) alone: a folder with CPU builds of torch on this machine is not looked at.

    python scripts/cuda_lock.py             exit 1 and the differing lines, if there are any
    python scripts/cuda_lock.py --update    writes the file, and requirements-cuda.json beside it: what torch and vLLM themselves
                                            require, with which a test compares the file where there is no index
"""

import io
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Mapping
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "scripts" / "requirements-cuda.txt"
REQUIRED = ROOT / "scripts" / "requirements-cuda.json"
HEAD = """\
# Resolved by scripts/cuda_lock.py from the metadata of the CUDA wheels, for Python 3.11 and 3.12 on Linux x86-64.
# Complete: installed without resolving (scripts/setup.sh).
"""
PYTHONS = ("3.11", "3.12")
PLATFORM = "x86_64-manylinux_2_31"  # the oldest glibc for which llguidance, which vLLM needs, has wheels: Debian 11, Ubuntu 20.04
UV = "uv==0.13.9"
# vLLM as the CPU's tests run it, and what installs rlgen itself without network (scripts/setup.sh).
ALSO = "vllm==0.32.0\nhatchling\neditables\n"
READ_BYTES = 1 << 16


class Remote(io.RawIOBase):
    """A file behind a URL that is read in parts, with range requests."""

    def __init__(self, url: str) -> None:
        self._url, self._place = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as answer:
            self._length = int(answer.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        return self._place

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        last = min(self._place + len(buffer), self._length) - 1
        if last < self._place:
            return 0
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={self._place}-{last}"})
        with urllib.request.urlopen(request) as answer:
            read = bytes(answer.read())
        buffer[: len(read)] = read
        self._place += len(read)
        return len(read)


def index_url() -> str:
    """Returns the index that pip is configured to use; PyPI if none."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    return os.environ.get("PIP_INDEX_URL") or asked.stdout.strip() or "https://pypi.org/simple"


def resolve(uv: Path, lock: Path, python: str, index: str) -> None:
    """Writes into `lock` what rlgen[cuda,dev] needs on `python`; pins that are in it already stay where they can.

    Raises:
        SystemExit: there is no such set; uv has said why.
    """
    command = [str(uv), "pip", "compile", "pyproject.toml", "-", "--extra", "cuda", "--extra", "dev", "--output-file", str(lock)]
    command += ["--python-version", python, "--python-platform", PLATFORM, "--no-build", "--no-header", "--no-annotate"]
    command += ["--no-config", "--quiet", "--index-url", index, "--cache-dir", str(uv.parent.parent / "cache")]
    done = subprocess.run(command, input=ALSO, text=True, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(f"rlgen[cuda] cannot be resolved for Python {python} from {index}")


def resolved(pins: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Returns the pins for all PYTHONS together, beginning with `pins`.

    Every Python is resolved twice, because the first round does not know yet which pins the last Python moves.

    Raises:
        SystemExit: there is no such set, or the Pythons need different versions of a package.
    """
    install = [sys.executable, "-m", "pip", "install", "--target", str(folder / "uv"), UV]
    if (done := subprocess.run(install, capture_output=True, text=True, check=False)).returncode:
        sys.exit(f"{UV} cannot be installed: {done.stderr}")
    index, found = index_url(), dict(pins)
    for _ in range(2):
        each: list[dict[str, str]] = []
        for python in PYTHONS:
            lock = folder / f"{python}.txt"
            lock.write_text("".join(f"{name}=={version}\n" for name, version in found.items()))
            resolve(folder / "uv" / "bin" / "uv", lock, python, index)
            each.append(read(lock))
            found |= each[-1]
    found = {name: version for own in each for name, version in own.items()}
    for python, own in zip(PYTHONS, each, strict=True):
        if other := [name for name in own if own[name] != found[name]]:
            sys.exit(
                f"Python {python} needs {other[0]} {own[other[0]]}, another one {found[other[0]]}: one file cannot hold both"
            )
    return found


def read(lock: Path) -> dict[str, str]:
    """Returns the pins of a file by normalised name: {"torch": "2.13.0", ...}."""
    lines = [line.split("#")[0].strip() for line in lock.read_text(encoding="utf-8").splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {name.lower().replace("_", "-").replace(".", "-"): version for name, version in pairs}


def requires(name: str, version: str, index: str) -> list[str]:
    """Returns the Requires-Dist lines, but those of extras, of the Linux wheel of a package, for the newest of PYTHONS."""
    request = urllib.request.Request(f"{index}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request) as answer:
        files = json.load(answer)["files"]
    tags = (f"cp{PYTHONS[-1].replace('.', '')}", "abi3")
    (url,) = [
        file["url"]
        for file in files
        if file["filename"].startswith(f"{name}-{version}-") and file["filename"].endswith("x86_64.whl")
        if file["filename"].split("-")[-2] in tags and "manylinux" in file["filename"]
    ]
    with zipfile.ZipFile(io.BufferedReader(Remote(url), READ_BYTES)) as wheel:
        (metadata,) = [member for member in wheel.namelist() if member.endswith(".dist-info/METADATA")]
        head = HeaderParser().parsestr(wheel.read(metadata).decode())
    return [line for line in head.get_all("Requires-Dist", []) if "extra ==" not in line]


def main() -> None:
    """Compares, or writes with --update."""
    update, pins = "--update" in sys.argv[1:], read(LOCK)
    with tempfile.TemporaryDirectory() as folder:
        found = resolved(pins, Path(folder))
    if update:
        LOCK.write_text(HEAD + "".join(f"{name}=={found[name]}\n" for name in sorted(found)), encoding="utf-8")
        own = {f"{name}=={found[name]}": requires(name, found[name], index_url()) for name in ("torch", "vllm")}
        REQUIRED.write_text(json.dumps(own, indent=1) + "\n", encoding="utf-8")
        print(f"{LOCK.relative_to(ROOT)}: {len(found)} pins")
        return
    differing = [f"- {name}=={pins[name]}" for name in pins if found.get(name) != pins[name]]
    differing += [f"+ {name}=={found[name]}" for name in found if pins.get(name) != found[name]]
    if differing:
        print("\n".join(sorted(differing, key=lambda line: line[2:])))
        sys.exit(f"{LOCK.relative_to(ROOT)} is not what the index resolves to: python scripts/cuda_lock.py --update")
    print(f"{LOCK.relative_to(ROOT)}: all {len(pins)} pins are what Python {' and '.join(PYTHONS)} resolve to")


if __name__ == "__main__":
    main()
