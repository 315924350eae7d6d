"""`rlgen validate`, `show` and `recipes`: quick answers about recipes, without torch."""

import ast
import csv
import glob
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rlgen
from rlgen.cli.output import echo
from rlgen.errors import DataError, Problem, RecipeError, RewardError, UsageError
from rlgen.recipe import LoadedRecipe, Recipe, dump_recipe, load_recipe
from rlgen.recipe.load import leaves
from rlgen.recipe.models import TASK_COLUMNS
from rlgen.recipe.rules import is_local_source

if TYPE_CHECKING:
    from rlgen.rewards.worker import Facts


def validate_command(path: Path, overrides: list[str], as_json: bool) -> None:
    """Raises RecipeError with everything that is wrong."""
    loaded = load_recipe(path, overrides)
    recipe = loaded.recipe
    columns = None if (problems := missing_files(loaded)) else known_columns(recipe)
    if problems := problems or unfilled_parameters(loaded, columns):
        raise RecipeError(problems)
    unknown = f"{recipe.data.source} is not read here; `rlgen rewards test` sees whether it has the columns that rewards need"
    notices = [*loaded.notices, *([unknown] if columns is None else [])]
    if as_json:
        echo(json.dumps({"valid": True, "recipe": str(path), "notices": notices, "plan": plan(recipe)}))
        return
    echo(f"{path}: valid")
    for notice in notices:
        echo(f"note: {notice}")
    echo(plan(recipe))
    echo("not looked at: rows of the data, the model, the GPU; `rlgen doctor` opens all of them")


def plan(recipe: Recipe) -> str:
    """What a step will be, in one line."""
    rollout, trainer = recipe.rollout, recipe.trainer
    updates = trainer.updates_per_rollout
    return (
        f"{recipe.run.steps} steps of {trainer.kind}: {rollout.prompts_per_step} prompts × {rollout.group_size} ="
        f" {recipe.samples_per_step} samples by the {recipe.engine.kind} engine,"
        f" {updates} update{'s' if updates > 1 else ''} each in micro-batches of at most"
        f" {recipe.optim.micro_batch_tokens} tokens; into {recipe.run_path}"
    )


def missing_files(loaded: LoadedRecipe) -> list[Problem]:
    """Local files of data and rewards that are not there, and functions that they do not define."""
    problems: list[Problem] = []
    source = loaded.recipe.data.source
    if is_local_source(source) and not glob.glob(source, recursive=True):
        problems.append(Problem(loaded.origins["data.source"], f"data.source: {source} does not exist"))
    for index, reward in enumerate(loaded.recipe.rewards):
        file, _, function = reward.use.rpartition(":")
        if not file.endswith(".py"):
            continue
        where = loaded.origins[f"rewards.{index}.use"]
        try:
            tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            problems.append(Problem(where, f"{file} cannot be read: {error}"))
            continue
        if function not in {name for node in tree.body for name in defined(node)}:
            problems.append(Problem(where, f"{file} defines no `{function}`"))
    return problems


def known_columns(recipe: Recipe) -> set[str] | None:
    """The columns that rewards will see, where they are known at once: of tasks, and of single local files. Else None."""
    source, columns = recipe.data.source, None
    if recipe.task is not None:
        columns = set(TASK_COLUMNS[recipe.task])
    elif is_local_source(source) and len(files := glob.glob(source, recursive=True)) == 1:
        try:
            with open(files[0], encoding="utf-8-sig", newline="") as file:
                if source.endswith(".csv"):
                    columns = set(next(csv.reader(file)))
                elif source.endswith(".jsonl"):
                    columns = set(json.loads(file.readline(1 << 20)))
                elif source.endswith(".parquet"):
                    from pyarrow.parquet import read_schema

                    columns = set(read_schema(files[0]).names)
        except (OSError, ValueError, TypeError, StopIteration, csv.Error):  # reading the data says what is wrong with it
            return None
    return columns if columns is None or recipe.data.columns.answer is None else {*columns, "answer"}


def unfilled_parameters(loaded: LoadedRecipe, columns: set[str] | None) -> list[Problem]:
    """Rewards with a parameter that nobody provides, as far as it can be known without running the user's code."""
    from rlgen.rewards.builtin import BUILTIN
    from rlgen.rewards.resolve import resolve
    from rlgen.rewards.worker import Source, load

    problems: list[Problem] = []
    for index, reward in enumerate(loaded.recipe.rewards):
        if columns is None:
            break
        file, _, function = reward.use.rpartition(":")
        facts = load(Source(reward.use, reward.timeout)).facts if reward.use in BUILTIN else None
        if file.endswith(".py"):
            facts = facts_of_source(Path(file).read_text(encoding="utf-8"), function)
        try:
            if facts is not None:
                resolve(reward, facts, columns)
        except (DataError, RewardError) as error:
            problems.append(Problem(loaded.origins[f"rewards.{index}.use"], str(error)))
    return problems


def facts_of_source(source: str, function: str) -> "Facts | None":
    """What a file says of a function that it defines at its top. None: decorated, imported or computed."""
    from rlgen.rewards.worker import Facts

    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    node = next((node for node in reversed(nodes) if node.name == function), None)
    if node is None or node.decorator_list:
        return None
    given = node.args
    first = len(given.posonlyargs) + len(given.args) - len(given.defaults)
    kinds = ["POSITIONAL_ONLY"] * len(given.posonlyargs) + ["POSITIONAL_OR_KEYWORD"] * len(given.args)
    parameters = [
        (one.arg, kind, place < first)
        for place, (one, kind) in enumerate(zip([*given.posonlyargs, *given.args], kinds, strict=True))
    ]
    parameters += [
        (one.arg, "KEYWORD_ONLY", default is None) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    parameters += [(given.kwarg.arg, "VAR_KEYWORD", True)] if given.kwarg else []
    return Facts(tuple(parameters), isinstance(node, ast.AsyncFunctionDef), None, None)


def defined(node: ast.stmt) -> list[str]:
    """Names that a statement at the top of a module brings."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def show_command(path: Path, overrides: list[str], resolved: bool, as_json: bool) -> None:
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
    """{"run.name": "demo", ...}"""
    data = recipe.model_dump(mode="json")
    values: dict[str, object] = {}
    for leaf in leaves(data):
        node: Any = data
        for part in leaf:
            node = node[part]
        values[".".join(map(str, leaf))] = node
    return values


def recipes_folder() -> Path:
    """The recipes of an installed rlgen lie in the package, those of a checkout beside it."""
    package = Path(rlgen.__file__).parent
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def list_command(as_json: bool) -> None:
    found = {path.stem: first_comment(path) for path in sorted(recipes_folder().glob("*.yaml"))}
    if as_json:
        echo(json.dumps(found, indent=2))
        return
    width = max(map(len, found), default=0)
    for name, what in found.items():
        echo(f"{name:<{width}}  {what}")


def first_comment(path: Path) -> str:
    return path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")


def copy_command(name: str, path: Path | None) -> None:
    """Raises UsageError for an unknown recipe or a file that exists."""
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
