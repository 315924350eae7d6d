"""Answers quick questions about recipes, without torch: `rlgen show` and `rlgen recipes`."""

import json
import shutil
from pathlib import Path

import rlgen
from rlgen.cli.output import echo
from rlgen.errors import UsageError
from rlgen.recipe import Recipe, dump_recipe, load_recipe
from rlgen.recipe.yaml import by_key


def show_command(path: Path, overrides: list[str], resolved: bool, as_json: bool) -> None:
    """Prints every value of a recipe with its origin, or with `resolved` the resolved recipe as YAML."""
    loaded = load_recipe(path, overrides)
    if resolved:
        echo(dump_recipe(loaded.recipe), nl=False, exact=True)
        return
    values = values_of(loaded.recipe)
    if as_json:
        echo(json.dumps({key: {"value": values[key], "origin": loaded.origins[key]} for key in values}, indent=2))
        return
    width = max(map(len, values))
    for key, value in values.items():
        echo(f"{key:<{width}} = {json.dumps(value, ensure_ascii=False):<24} {loaded.origins[key]}")


def values_of(recipe: Recipe) -> dict[str, object]:
    """Returns the values by dotted key: {"run.name": "demo", ...}."""
    return by_key(recipe.model_dump(mode="json"))


def recipes_folder() -> Path:
    """Returns the folder of the shipped recipes: in the package if rlgen is installed, beside it in a checkout."""
    package = Path(rlgen.__file__).parent
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def list_command(as_json: bool) -> None:
    """Lists the shipped recipes with their first comment."""
    found = {path.stem: first_comment(path) for path in sorted(recipes_folder().glob("*.yaml"))}
    if as_json:
        echo(json.dumps(found, indent=2))
        return
    width = max(map(len, found), default=0)
    for name, what in found.items():
        echo(f"{name:<{width}}  {what}")


def first_comment(path: Path) -> str:
    """Returns the first line of a file without its `#`."""
    return path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")


def copy_command(name: str, path: Path | None) -> None:
    """Copies a shipped recipe. Raises UsageError for an unknown recipe or if the target exists."""
    source = recipes_folder() / f"{name.removesuffix('.yaml')}.yaml"
    if not source.is_file():
        known = ", ".join(file.stem for file in sorted(recipes_folder().glob("*.yaml")))
        raise UsageError(f"there is no recipe {name}; there are {known}")
    target = path or Path(source.name)
    target = target / source.name if target.is_dir() else target
    if target.exists():
        raise UsageError(f"{target} exists already; name another file")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    echo(f"{target} written; next: rlgen validate {target}")
