"""Writes and checks `manifest.json`: facts about a checkpoint, and the size and SHA-256 of each of its files.

It is written last: a checkpoint without one is incomplete. It contains a digest of itself, so that every changed bit of a
checkpoint is detected. It protects against faults, not against forgery: no file that it names is ever unpickled or executed.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlgen.errors import CheckpointError, DamagedCheckpoint
from rlgen.files import flush_folder, flush_to_disk, read_json, write_json

FORMAT = 2
NAME = "manifest.json"
READERS = 4  # number of files that are hashed at the same time


@dataclass(frozen=True, slots=True)
class File:
    size: int  # bytes
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of manifest.json.

    Manifest(step=20, time=1.7e9, rlgen="0.1.0", trainer="grpo", processes=2, model={...}, files={...}, format=2)
    """

    step: int
    time: float  # seconds since 1970
    rlgen: str  # version of rlgen
    trainer: str | None  # kind of the trainer
    processes: int  # number of processes that wrote it
    model: dict[str, Any]  # facts by which two models differ; `lora`: those of an adapter, or None
    files: dict[str, File]  # by path in the folder
    format: int = FORMAT

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


def seal(folder: Path, facts: Mapping[str, Any], known: Mapping[str, File] | None = None) -> Manifest:
    """Flushes every file in `folder`, and writes the manifest. The checkpoint is complete when this returns.

    `known` are files that the processes which wrote them have hashed; this one hashes the rest.
    """
    flush_folder(folder)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = {**(known or {}), **hashed(folder, [name for name in names if name not in (known or {})])}
    manifest = Manifest(**facts, files=dict(sorted(files.items())))
    content = asdict(manifest)
    write_json(folder / NAME, {**content, "sha256": manifest_digest(content)})
    flush_to_disk(folder)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of `folder`, and checks its own digest; does not look at the other files.

    Raises DamagedCheckpoint if that fails, or the checkpoint was never finished; CheckpointError if it is of another format.
    """
    try:
        content = read_json(folder / NAME)
        own = content.pop("sha256")
    except FileNotFoundError:
        with suppress(OSError, ValueError, KeyError, TypeError):  # before manifests were introduced, the state had the format
            check_format(folder, read_json(folder / "state" / "state.json")["format"])
        raise DamagedCheckpoint(f"{folder}: {NAME} is missing: the checkpoint was never finished") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{folder}: {NAME} cannot be read: {error}") from error
    if manifest_digest(content) != own:
        raise DamagedCheckpoint(f"{folder}: {NAME} has changed since it was written")
    check_format(folder, content.get("format", FORMAT))
    return Manifest(**{**content, "files": {name: File(**file) for name, file in content["files"].items()}})


def check_format(folder: Path, found: object) -> None:
    """Raises CheckpointError if a checkpoint is of another format than this version reads."""
    if found != FORMAT:
        raise CheckpointError(
            f"{folder} is of checkpoint format {found}, but this rlgen reads {FORMAT}: use the rlgen that wrote it, or start a"
            " new run"
        )


def check_files(folder: Path, hashes: bool, rank: int = 0, world: int = 1) -> Manifest:
    """Checks that the files of a checkpoint are as they were written, and that its name has its step; returns its manifest.

    Without `hashes` only names and sizes are compared; of `world` processes, each hashes its share of the files.

    Raises:
        DamagedCheckpoint: with the names of files.
        CheckpointError: the checkpoint is of another format.
    """
    manifest = read_manifest(folder)
    files, same = manifest.files, []
    try:
        found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
        found.pop(NAME, None)
        wrong = [f"{name} is missing" for name in sorted(files.keys() - found.keys())]
        wrong += [f"{name} does not belong there" for name in sorted(found.keys() - files.keys())]
        for name in sorted(files.keys() & found.keys()):
            size = found[name].lstat().st_size
            if found[name].is_symlink():
                wrong.append(f"{name} is a link")
            elif size != files[name].size:
                wrong.append(f"{name} has {size:,} bytes of {files[name].size:,}")
            else:
                same.append(name)
        now = hashed(folder, same[rank::world]) if hashes else {}
        wrong += [f"{name} has other bytes than were written" for name in now if now[name].sha256 != files[name].sha256]
    except OSError as error:
        raise DamagedCheckpoint(f"{folder} cannot be read: {error}") from error
    if re.fullmatch(r"step_\d+", folder.name) and int(folder.name.removeprefix("step_")) != manifest.step:
        wrong.append(f"it was written after step {manifest.step}, and renamed or copied since")
    if wrong:
        raise DamagedCheckpoint(f"{folder}: {'; '.join(wrong)}")
    return manifest


def check_model_files(folder: Path) -> None:
    """Checks that the model files of `folder` are as they were written, if it is a checkpoint. Ignores the trainer's state."""
    file = folder / NAME
    if not file.is_file() or b'"rlgen"' not in file.read_bytes():  # other tools may use a file of that name
        return
    files = {name: written for name, written in read_manifest(folder).files.items() if not name.startswith("state/")}
    try:
        now = hashed(folder, [name for name in files if (folder / name).is_file()])
    except OSError as error:
        raise DamagedCheckpoint(f"model.path: {folder} cannot be read: {error}") from error
    if wrong := [name for name, written in files.items() if now.get(name) != written]:
        raise DamagedCheckpoint(
            f"model.path: {folder}: changed since it was written: {', '.join(wrong)}. Restore the files, or take another"
            f" checkpoint; if you changed them on purpose, remove {NAME}"
        )


def hashed(folder: Path, names: list[str]) -> dict[str, File]:
    with ThreadPoolExecutor(max_workers=READERS) as readers:
        return dict(zip(names, readers.map(lambda name: hash_file(folder / name), names), strict=True))


def hash_file(path: Path) -> File:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return File(size=os.fstat(file.fileno()).st_size, sha256=sha256)


def manifest_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def changed_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns what differs between two mappings, in words: ["hidden_size was 64 and is 128", ...]."""
    return [f"{key} was {before.get(key)} and is {now.get(key)}" for key in {**before, **now} if before.get(key) != now.get(key)]
