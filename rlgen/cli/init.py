"""Writes a folder to start from: `rlgen init`."""

import shlex
import shutil
from pathlib import Path

from rlgen.cli.inspect import schema_text
from rlgen.cli.output import echo
from rlgen.errors import CheckpointError, UsageError

STARTER = Path(__file__).parent / "starter"  # recipe, rewards with their test, data, README
SCHEMA = "recipe.schema.json"  # as the first line of the recipe names it


def init_command(folder: Path) -> None:
    """Writes recipe, rewards, data and the schema of recipes into a folder, which is new or empty."""
    names = sorted(path.name for path in STARTER.iterdir() if path.is_file())
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; name a folder")
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty; name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(STARTER / name, folder / name)
        (folder / SCHEMA).write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}; name another folder") from error
    echo(f"{folder} written: {', '.join([*names, SCHEMA])}")
    goes = f"cd {shlex.quote(str(folder))} && " if folder.resolve() != Path.cwd() else ""
    echo(f"next: {goes}rlgen recipes warm-start recipe.yaml")
