"""Looks at the local files that a recipe names, without importing anything heavy and without running a user's code here."""

import ast
import csv
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlgen.errors import DataError, Problem, RecipeError, RewardError, ToolError
from rlgen.recipe import LoadedRecipe, Recipe
from rlgen.recipe.data import TASK_COLUMNS
from rlgen.recipe.evaluation import data_of, eval_rewards
from rlgen.recipe.judges import MODEL_REWARDS, JudgeArgs, RewardModelArgs, settings_of
from rlgen.recipe.messages import suggest
from rlgen.recipe.models import BUILT_IN_REWARDS, SEED_COLUMN, RewardRecipe, ScoringRecipe
from rlgen.recipe.paths import like, matches, named_functions
from rlgen.recipe.rules import is_local_model, is_local_source

if TYPE_CHECKING:
    from rlgen.worker_pool.source import FunctionFacts

HUB = "name a folder that save_pretrained wrote; a model of the hub is written as owner/name, such as Qwen/Qwen3-0.6B"


def looked_up(loaded: LoadedRecipe, imports: bool = True) -> set[str] | None:
    """Returns the columns of the data; None: the data must be loaded to know them. Imports the user's rewards and tools, in a
    process of their own, unless `imports` is false. Raises RecipeError for a file, a column or a function that cannot be used.
    """
    problems = [*missing_files(loaded)]
    columns = known_columns(loaded.recipe)
    problems = problems or [*unknown_columns(loaded, columns), *unfilled_parameters(loaded, columns)]
    if imports:
        problems = problems or [*unusable_functions(loaded)]
    if problems:
        raise RecipeError(problems)
    return columns


def of_evaluation(loaded: LoadedRecipe) -> LoadedRecipe | None:
    """Returns a recipe whose data and rewards are those of the evaluations, for the same checks; None without evaluations."""
    recipe, held = loaded.recipe, loaded.recipe.eval
    if held is None:
        return None
    origins = dict(loaded.origins)
    for key in ("source", "columns.prompt", "columns.answer"):
        own = loaded.origins.get(f"eval.{key}", "default")
        origins[f"data.{key}"] = loaded.origins[f"data.{key}"] if own == "default" else own
    if held.rewards is not None:
        origins |= {name.removeprefix("eval."): at for name, at in loaded.origins.items() if name.startswith("eval.rewards.")}
    changes = {"data": data_of(held, recipe.data), "rewards": eval_rewards(held, recipe.rewards)}
    return replace(loaded, recipe=recipe.model_copy(update=changes), origins=origins)


def missing_files(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Yields a problem for each local file that the recipe names and is not there, and each function that its file lacks."""
    recipe, origins = loaded.recipe, loaded.origins
    model, source = recipe.model.path, recipe.data.source
    if is_local_model(model) and not Path(model).is_dir():
        made = f"`rlgen recipes warm-start {loaded.path}` makes a small one" if recipe.task else None
        is_file = Path(model).is_file()
        what = f"model.path: {model} is a file" if is_file else f"model.path: there is no folder {model}"
        yield Problem(origins["model.path"], what, HUB if is_file else like(model) or made or HUB)
    if is_local_source(source) and not matches(source):
        yield Problem(origins["data.source"], f"data.source: {source} does not exist", like(source))
    if (template := recipe.data.chat_template) is not None and not Path(template).is_file():
        what = f"data.chat_template: {template} does not exist"
        reason = like(template) or "it is a file with a template (Jinja); without the key the tokenizer's own is used"
        yield Problem(origins["data.chat_template"], what, reason)
    yield from unusable_models(loaded)
    for place, use, _ in named_functions(recipe):
        key, (file, _, function) = ".".join(map(str, (*place, "use"))), use.rpartition(":")
        if not file.endswith(".py") or place[0] == "eval":  # those of evaluations: see `of_evaluation`
            continue
        try:
            tree = ast.parse(
                Path(file).read_bytes()
            )  # as Python reads it: with a byte order mark, or a line that says the coding
        except (OSError, SyntaxError, ValueError) as error:
            hint = like(file) if isinstance(error, FileNotFoundError) else None
            yield Problem(origins[key], f"{file} cannot be read: {error}", hint)
            continue
        names = [name for node in tree.body for name in defined(node)]
        if function not in names:
            hint = suggest(function, names, None) or f"it defines {', '.join(names) or 'nothing'}"
            yield Problem(origins[key], f"{file} defines no `{function}`", hint)
        elif key.startswith("rewards.") and (node := plain_function(tree, function)) is not None:
            raises = any(isinstance(part, ast.Raise) for part in node.body)  # a stub that raises reports itself when it is called
            if not raises and not any(isinstance(part, ast.Return) and part.value is not None for part in ast.walk(node)):
                yield Problem(origins[key], f"{file}: `{function}` returns nothing", "end it with `return` and the reward")


def defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def plain_function(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Returns a function that a file defines at its top level. None: it is decorated, imported or computed."""
    nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name]
    return nodes[-1] if nodes and not nodes[-1].decorator_list else None


def unusable_models(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Yields a problem for each reward that asks a model and names a folder or a file that cannot be used. Loads no weights."""
    for index, reward in enumerate(loaded.recipe.rewards):
        settings, key, file, why = settings_of(reward), "", "", None
        if isinstance(settings, RewardModelArgs) and Path(settings.path).is_absolute():
            key, file, why = f"rewards.{index}.args.path", settings.path, not_a_reward_model(Path(settings.path))
        elif isinstance(settings, JudgeArgs) and settings.prompt_file is not None:
            key, file = f"rewards.{index}.args.prompt_file", settings.prompt_file
            try:
                settings.check_question(Path(file).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                why = f": {error}"
        if why is not None:
            where = loaded.origins.get(key, loaded.origins[f"rewards.{index}.use"])
            yield Problem(where, f"{key}: {file}{why}", like(file))


def not_a_reward_model(folder: Path) -> str | None:
    """Returns what its config says against a folder that should hold a model with one score; None: nothing."""
    if not folder.is_dir():
        return " is not a folder"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kinds = [str(name) for name in config.get("architectures") or ()]
        labels = config.get("num_labels") or len(config.get("id2label") or (0, 1))  # two is the default of transformers
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f" has no config.json that can be read: {error}"
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        return f" is a {' '.join(kinds) or 'model of an unknown kind'}, but a reward model is one for sequence classification"
    return None if labels == 1 else f" has {labels} labels; a reward model has one, which is its score"


def unknown_columns(loaded: LoadedRecipe, columns: set[str] | None) -> Iterator[Problem]:
    """Yields a problem for each column that the recipe names and the data lack, as far as `known_columns` knows them."""
    named = loaded.recipe.data.columns
    if columns is None or loaded.recipe.task is not None:
        return
    there = sorted(columns)
    for key, column in (("prompt", named.prompt), ("answer", named.answer)):
        if column is None or column in there:
            continue
        close = get_close_matches(column, there, n=1, cutoff=0.7)
        hint = f"did you mean `{close[0]}`? " if close else ""
        if "conversations" in there:
            hint = "rows of ShareGPT hold the answers too: write the messages before the last answer into a column of their own; "
        for mark, marks in ((";", "`;`"), ("\t", "tabs")):
            if len(there) == 1 and mark in there[0]:
                hint = f"separate the columns with commas, not with {marks}: "
        where = loaded.origins[f"data.columns.{key}"]
        where = loaded.origins["data.source"] if where == "default" else where
        what = f"data.columns.{key}: {loaded.recipe.data.source} has no column `{column}`"
        yield Problem(where, what, f"{hint}it has {', '.join(there)}; set data.columns.{key} to one of them")


def unusable_functions(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Yields a problem for each reward that cannot be imported, each tool that cannot be imported or described to a model, and
    an environment that cannot be used. Each is tried in a process of its own, as in a run.
    """
    recipe = loaded.recipe
    tries: dict[str, Callable[[], object]] = {}  # by key
    for index, reward in enumerate(recipe.rewards):
        if reward.use not in (*BUILT_IN_REWARDS, *MODEL_REWARDS):  # models are loaded by `rlgen rewards test`, and by a run
            tries[f"rewards.{index}.use"] = partial(import_reward, reward, recipe.scoring)
    if recipe.tools:
        from rlgen.tools.box import schemas_of

        tries |= {f"tools.{index}.use": partial(schemas_of, [tool], recipe.scoring) for index, tool in enumerate(recipe.tools)}
    if recipe.environment is not None:
        from rlgen.tools.arena import open_arena

        environment = recipe.environment
        tries["environment.use"] = lambda: open_arena(environment, recipe.scoring).close()
    for key, attempt in tries.items():
        try:
            attempt()
        except (RewardError, ToolError) as error:
            yield Problem(loaded.origins[key], str(error))


def import_reward(reward: RewardRecipe, scoring: ScoringRecipe) -> None:
    from rlgen.rewards.load import RewardSource
    from rlgen.worker_pool.pool import Pool, limits_of

    with closing(Pool([RewardSource(reward.use, reward.timeout)], replace(limits_of(scoring), workers=1), None)) as pool:
        pool.facts()


def known_columns(recipe: Recipe) -> set[str] | None:
    """Returns the columns of tasks and of single local files; None: they are not known without loading the data."""
    source, columns = recipe.data.source, None
    if recipe.task is not None:
        columns = set(TASK_COLUMNS[recipe.task])
    elif is_local_source(source) and len(files := matches(source)) == 1:
        try:
            with open(files[0], encoding="utf-8-sig", newline="") as file:
                if source.endswith(".csv"):
                    columns = set(next(csv.reader(file)))
                elif source.endswith(".jsonl"):
                    columns = set(json.loads(file.readline(1 << 20)))
                elif source.endswith(".parquet"):
                    from pyarrow.parquet import read_schema

                    columns = set(read_schema(files[0]).names)
        except (OSError, ValueError, TypeError, StopIteration, csv.Error):  # loading the data reports what is wrong with it
            return None
    return columns


def unfilled_parameters(loaded: LoadedRecipe, columns: set[str] | None) -> Iterator[Problem]:
    """Yields a problem for each reward with a parameter that nothing fills, as far as it is known without running user code."""
    from rlgen.rewards.builtin import BUILTIN
    from rlgen.rewards.load import RewardSource, facts_of_model
    from rlgen.rewards.resolve import MESSAGES, resolve

    if columns is None:
        return
    answer, talks, environment = loaded.recipe.data.columns.answer, loaded.recipe.talks, loaded.recipe.environment
    columns = {*columns, *(["answer"] if answer else ()), *([MESSAGES] if talks else ()), *([SEED_COLUMN] if environment else ())}
    for index, reward in enumerate(loaded.recipe.rewards):
        file, _, function = reward.use.rpartition(":")
        facts = RewardSource(reward.use, reward.timeout).load().facts if reward.use in BUILTIN else None
        if (settings := settings_of(reward)) is not None:
            facts = facts_of_model(settings)
        if file.endswith(".py"):
            node = plain_function(ast.parse(Path(file).read_bytes()), function)
            facts = None if node is None else signature_of(node)
        try:
            if facts is not None:
                resolve(reward, facts, columns)
        except (DataError, RewardError) as error:
            yield Problem(loaded.origins[f"rewards.{index}.use"], str(error))


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> "FunctionFacts":
    """Returns the signature of a function that is not decorated."""
    from rlgen.worker_pool.source import FunctionFacts

    given = node.args
    first = len(given.posonlyargs) + len(given.args) - len(given.defaults)
    kinds = [(one, "POSITIONAL_ONLY") for one in given.posonlyargs] + [(one, "POSITIONAL_OR_KEYWORD") for one in given.args]
    parameters = [(one.arg, kind, place < first) for place, (one, kind) in enumerate(kinds)]
    parameters += [
        (one.arg, "KEYWORD_ONLY", default is None) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    parameters += [(given.kwarg.arg, "VAR_KEYWORD", True)] if given.kwarg else []
    return FunctionFacts(tuple(parameters), isinstance(node, ast.AsyncFunctionDef), None, None)
