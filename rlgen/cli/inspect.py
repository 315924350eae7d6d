"""Shows recipes, and writes what to start from. Quick answers import no torch."""

import json
import re
import shlex
import shutil
import textwrap
from pathlib import Path

import rlgen
from rlgen.cli.output import check_file, echo
from rlgen.errors import UsageError
from rlgen.files import write_text, written
from rlgen.recipe import dump_recipe, load_recipe
from rlgen.recipe.data import TASKS
from rlgen.recipe.keys import HEADER, recipe_schema, sentences
from rlgen.recipe.paths import named_functions
from rlgen.recipe.rules import is_local_model
from rlgen.recipe.yaml import by_key

COLUMNS = 80
OF_CHECKOUT, OF_COPY = "../runs/", "runs/"  # folder of runs, as a shipped recipe sees it and as its copy does
STARTER = Path(__file__).parent / "starter"  # recipe, rewards with their test, data, README
SCHEMA = "recipe.schema.json"  # as the first line of that recipe names it


def show_command(path: Path, overrides: list[str], resolved: bool, as_json: bool) -> None:
    loaded = load_recipe(path, overrides)
    if resolved:
        echo(dump_recipe(loaded.recipe), nl=False, exact=True)
        return
    values = by_key(loaded.recipe.model_dump(mode="json"))
    if as_json:
        echo(json.dumps({key: {"value": values[key], "origin": loaded.origins[key]} for key in values}))
        return
    said = sentences(loaded.recipe)
    if loaded.recipe.task is not None:
        options = TASKS[loaded.recipe.task].model_validate(loaded.recipe.data.options or {})
        said |= sentences(options, "data.options.")
    shown: set[str] = set()  # sections
    for key, value in values.items():
        parts = key.split(".")
        for section in (".".join(parts[:end]) for end in range(1, len(parts))):
            if said.get(section) and section not in shown:
                shown.add(section)
                echo(("\n" if "." not in section else "") + folded(f"{section}: {said[section]}", "", "    "))
        echo(folded(f"{key} = {json.dumps(value, ensure_ascii=False)}  ({loaded.origins[key]})", "  ", "        "))
        if said.get(key):
            echo(folded(said[key], "    ", "    "))


def folded(text: str, first: str, rest: str) -> str:
    """Returns a text in lines of at most `COLUMNS` characters, indented by `first` and `rest`. A longer word stays whole."""
    return textwrap.TextWrapper(COLUMNS, first, rest, break_long_words=False, break_on_hyphens=False).fill(text)


def schema_command(out: Path | None) -> None:
    if out is None:
        echo(schema_text(), nl=False, exact=True)
        return
    if out.suffix != ".json":
        raise UsageError(f"--out: {out} does not end in .json, and JSON would overwrite it; name a file that does")
    check_file(out)
    write_text(out, schema_text())
    echo(f"{out} written; first line of a recipe beside it: {HEADER}{out.name}")


def schema_text() -> str:
    return json.dumps(recipe_schema(), indent=2, ensure_ascii=False) + "\n"


def recipes() -> dict[str, Path]:
    """Returns the shipped recipes by name: in the package if rlgen is installed, beside it in a checkout."""
    package = Path(rlgen.__file__).parent
    installed = package / "_recipes"
    folder = installed if installed.is_dir() else package.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def list_recipes_command(as_json: bool) -> None:
    """Lists the shipped recipes with their first comment, what each needs and how long it takes."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in recipes().items()}
    found = {name: text.split("\n", 1)[0].lstrip("# ") for name, text in texts.items()}
    if as_json:
        echo(json.dumps(found))
        return
    width = max(map(len, found), default=0) + 2
    for name, what in found.items():
        echo(folded(f"{name:<{width}}{what}", "", " " * width))
        said = dict(re.findall(r"^# (Needs|Time): *(.+)$", texts[name], re.MULTILINE))
        needs = re.split("[;:.] ", said.get("Needs", "not said"))[0]
        echo(folded(f"needs {needs}; time: {said.get('Time', 'not said')}", " " * width, " " * width))


def copy_command(name: str, path: Path | None) -> None:
    """Copies a shipped recipe, and the files of rewards, tools and chat template that it names. A path into the checkout's folder
    of runs becomes one beside the copy. Raises UsageError for an unknown recipe or if a target exists.
    """
    source = recipes().get(name.removesuffix(".yaml"))
    if source is None:
        raise UsageError(f"there is no recipe {name}; there are {', '.join(recipes())}")
    target = path or Path(source.name)
    target = target / source.name if target.is_dir() else target
    texts = {target: source.read_text(encoding="utf-8").replace(OF_CHECKOUT, OF_COPY)}
    recipe = load_recipe(source).recipe
    code = [file for file in (use.rpartition(":")[0] for _, use, _ in named_functions(recipe)) if file.endswith(".py")]
    for file in map(Path, filter(None, dict.fromkeys([*code, recipe.data.chat_template]))):
        texts[target.parent / file.name] = file.read_text(encoding="utf-8")
    for file, text in texts.items():
        if file.exists() and (file == target or file.read_text(encoding="utf-8") != text):
            raise UsageError(f"{file} exists already; name another {'file' if file == target else 'folder'}")
    with written(target.parent, remedy="name another folder"):
        target.parent.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            file.write_text(text, encoding="utf-8")
    model = load_recipe(target).recipe.model.path
    warm = is_local_model(model) and not Path(model).is_dir()
    names = " and ".join(map(str, texts))
    echo(f"{names} written; next: rlgen {'recipes warm-start' if warm else 'validate'} {target}")


def init_command(folder: Path) -> None:
    names = sorted(path.name for path in STARTER.iterdir() if path.is_file())
    with written(folder, remedy="name another folder"):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; name a folder")
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty; name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(STARTER / name, folder / name)
        (folder / SCHEMA).write_text(schema_text(), encoding="utf-8")
    echo(f"{folder} written: {', '.join([*names, SCHEMA])}")
    goes = f"cd {shlex.quote(str(folder))} && " if folder.resolve() != Path.cwd() else ""
    echo(f"next: {goes}rlgen recipes warm-start recipe.yaml")


def warm_start_command(path: Path, model: str, out: Path | None, accuracy: float) -> None:
    """Trains a small `model` on the answers of the recipe's data until this share of sampled answers is right, and writes it
    where the recipe's `model.path` is, or into `out`.
    """
    recipe = load_recipe(path).recipe
    if recipe.task is None and recipe.data.columns.answer is None:
        raise UsageError(f"{path}: data.columns.answer names no column of answers to learn from; add `answer: COLUMN`")
    if out is None and not is_local_model(recipe.model.path):
        raise UsageError(f"{path}: model.path {recipe.model.path} is not a folder that can be written; name one with --out")
    folder = (out or Path(recipe.model.path)).expanduser().resolve()
    if folder.exists():
        raise UsageError(f"{folder} exists already; name another folder with --out")
    started = load_recipe(path, [f"model.path={model}"]).recipe

    from transformers.utils.logging import disable_progress_bar

    from rlgen.setup.warm import warm_start

    disable_progress_bar()
    right = warm_start(started, folder, accuracy, echo)
    elsewhere = "" if folder == Path(recipe.model.path) else f" --set model.path={shlex.quote(str(folder))}"
    echo(f"{folder} written: {right:.0%} of its sampled answers are right; next: rlgen train {shlex.quote(str(path))}{elsewhere}")
