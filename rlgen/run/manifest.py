"""`manifest.json`: what a checkpoint is of, and the size and SHA-256 of each of its files.

It is written last: a checkpoint without one was never finished. It has a digest of its own, so that no bit of a checkpoint
changes unnoticed. It is a guard against faults and not against forgers: nothing that it names is ever unpickled or run.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlgen.errors import CheckpointError, DamagedCheckpoint
from rlgen.files import flush, flush_tree, read_json, write_json

FORMAT = 2
NAME = "manifest.json"
READERS = 4  # files that are hashed at a time


@dataclass(frozen=True, slots=True)
class File:
    """File(size=4096, sha256="9f86d0...")"""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Manifest(step=20, time=1.7e9, rlgen="0.1.0", trainer="grpo", processes=2, model={...}, files={...}, format=2)"""

    step: int
    time: float  # seconds since 1970
    rlgen: str  # version
    trainer: str | None  # its kind
    processes: int  # that wrote it
    model: dict[str, Any]  # facts by which two models differ; `lora`: those of an adapter, or None
    files: dict[str, File]  # by path in the folder
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(file.size for file in self.files.values())


def seal(folder: Path, facts: Mapping[str, Any]) -> Manifest:
    """Flushes every file in `folder`, and writes the manifest: the folder is a checkpoint when this returns.

    Raises:
        OSError, CheckpointError: something cannot be written.
    """
    flush_tree(folder)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    manifest = Manifest(**facts, files=hashed(folder, names))
    content = asdict(manifest)
    write_json(folder / NAME, {**content, "sha256": digest(content)})
    flush(folder)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """What `folder` claims to be.

    Raises:
        DamagedCheckpoint: it is no checkpoint, or was never finished, or the manifest itself is damaged.
        CheckpointError: it is of another format.
    """
    try:
        content = read_json(folder / NAME)
        own = content.pop("sha256")
    except FileNotFoundError:
        check_format(folder, old_format(folder))
        raise DamagedCheckpoint(f"{folder}: {NAME} is missing: it was never finished") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{folder}: {NAME} cannot be read: {error}") from error
    if digest(content) != own:
        raise DamagedCheckpoint(f"{folder}: {NAME} is not what was written")
    check_format(folder, content.get("format"))
    return Manifest(**{**content, "files": {name: File(**file) for name, file in content["files"].items()}})


def check_format(folder: Path, found: object) -> None:
    """Raises CheckpointError unless it is the one that is read here."""
    if found != FORMAT and found is not None:
        raise CheckpointError(
            f"{folder} is of checkpoint format {found}, and this rlgen reads {FORMAT}: go on with the rlgen that wrote it, or"
            " start another run"
        )


def old_format(folder: Path) -> int | None:
    """Of a checkpoint that was written before there were manifests; None: it is no such one."""
    try:
        found = read_json(folder / "state" / "state.json")["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) and found < FORMAT else None


def damage(folder: Path, manifest: Manifest, hashes: bool) -> list[str]:
    """What is wrong with the files, each in a few words: missing, of another size, too many; with `hashes`, other bytes."""
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()}
    found.pop(NAME, None)
    wrong = [f"{name} is missing" for name in sorted(manifest.files.keys() - found.keys())]
    wrong += [f"{name} does not belong there" for name in sorted(found.keys() - manifest.files.keys())]
    same = []
    for name in sorted(manifest.files.keys() & found.keys()):
        size = found[name].lstat().st_size
        if found[name].is_symlink():
            wrong.append(f"{name} is a link")
        elif size != manifest.files[name].size:
            wrong.append(f"{name} has {size:,} bytes of {manifest.files[name].size:,}")
        else:
            same.append(name)
    if hashes:
        now = hashed(folder, same)
        wrong += [f"{name} has other bytes than were written" for name in same if now[name].sha256 != manifest.files[name].sha256]
    return wrong


def check_files(folder: Path, hashes: bool) -> Manifest:
    """The manifest of a checkpoint that is what was written.

    Args:
        hashes: read every byte; otherwise names and sizes alone are compared.

    Raises:
        DamagedCheckpoint: it is not; names the files.
        CheckpointError: it is of another format.
    """
    manifest = read_manifest(folder)
    try:
        wrong = damage(folder, manifest, hashes)
    except OSError as error:
        raise DamagedCheckpoint(f"{folder} cannot be read: {error}") from error
    if wrong:
        raise DamagedCheckpoint(f"{folder}: {'; '.join(wrong)}")
    return manifest


def check_model_files(folder: Path) -> None:
    """Where `folder` is a checkpoint, all that a model is opened from is what was written; the trainer's state is not looked at.

    Raises:
        DamagedCheckpoint: it is not; names the files.
        CheckpointError: it is of another format.
    """
    file = folder / NAME
    if not file.is_file() or b'"rlgen"' not in file.read_bytes():  # others may have a file of that name
        return
    files = {name: written for name, written in read_manifest(folder).files.items() if not name.startswith("state/")}
    try:
        now = hashed(folder, [name for name in files if (folder / name).is_file()])
    except OSError as error:
        raise DamagedCheckpoint(f"model.path: {folder} cannot be read: {error}") from error
    if wrong := [name for name, written in files.items() if now.get(name) != written]:
        raise DamagedCheckpoint(
            f"model.path: {folder}: not what was written: {', '.join(wrong)}. Bring the files back, or take another checkpoint;"
            f" if they were changed on purpose, remove {NAME}"
        )


def hashed(folder: Path, names: list[str]) -> dict[str, File]:
    """Size and hash of each file."""
    with ThreadPoolExecutor(max_workers=READERS) as readers:
        return dict(zip(names, readers.map(lambda name: hash_file(folder / name), names), strict=True))


def hash_file(path: Path) -> File:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return File(size=os.fstat(file.fileno()).st_size, sha256=sha256)


def digest(content: Mapping[str, Any]) -> str:
    """Of the manifest itself."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """["hidden_size was 64 and is 128", ...]"""
    return [f"{key} was {before.get(key)} and is {now.get(key)}" for key in {**before, **now} if before.get(key) != now.get(key)]
