"""Checks a recipe without running it: `rlgen validate`.

Mistakes in the recipe itself are found without heavy imports. Then the local files of data, model and rewards are opened, and the
first prompts are shown as the model will see them.
"""

import json
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlgen.cli.files import (
    known_columns,
    missing_files,
    of_evaluation,
    unfilled_parameters,
    unknown_columns,
    unusable_rewards,
    unusable_tools,
)
from rlgen.cli.output import echo
from rlgen.errors import RecipeError
from rlgen.recipe import LoadedRecipe, Recipe, load_recipe
from rlgen.recipe.evaluation import data_of
from rlgen.recipe.paths import like
from rlgen.recipe.rules import is_local_model, is_local_source
from rlgen.run.sinks.open import check_libraries

if TYPE_CHECKING:
    from rlgen.setup.data import Data, HeldOut

IDS_SHOWN = 24  # ids of a prompt that are shown from its start; the last ones follow
LAST_IDS = 4
NEEDED = ("torch", "transformers", "datasets")  # packages without which prompts cannot be rendered


@dataclass(frozen=True, slots=True)
class Rendered:
    """One prompt as the model sees it."""

    row: int
    text: str
    ids: list[int]


def validate_command(path: Path, overrides: list[str], as_json: bool, count: int) -> None:
    """Checks a recipe, opens the local files that it names, and prints what was found.

    Args:
        count: prompts to show; with 0 neither model nor data are opened.

    Raises:
        RecipeError: with everything that is wrong with the recipe and with the files that it names.
        DataError: the rows of the data cannot be prompts.
        SetupError: the library of a sink is not installed; the model's tokenizer, config or chat template cannot be used.
    """
    loaded = load_recipe(path, overrides)
    check_libraries(loaded.recipe)
    columns = looked_up(loaded)
    if (held := of_evaluation(loaded)) is not None:
        look_at_evaluation(held, imports=loaded.recipe.eval is not None and loaded.recipe.eval.rewards is not None)
    recipe, warnings = loaded.recipe, list(loaded.warnings)
    notices = [*loaded.notices, *unread(recipe, columns, path.resolve().parent)]
    if not as_json:
        for kind, lines in (("warning", warnings), ("note", notices)):
            for line in lines:
                echo(f"{kind}: {line}")
        echo(plan(recipe))
    data = opened(recipe) if count and can_open(recipe) else None
    if data is not None and recipe.tools:
        from rlgen.setup.data import open_turns

        open_turns(recipe, data.tokenizer, data.stop_ids, None).close()
    shown = [] if data is None else rendered(data, count)
    if as_json:
        report = {"valid": True, "recipe": str(path), "notices": notices, "warnings": warnings, "plan": plan(recipe)}
        echo(json.dumps(report | of_data(data, shown)))
        return
    if data is not None:
        show(data, shown)
    looked = "the model's weights" if data is not None else "rows of the data, the model"
    echo(f"not checked: {looked}, the GPU; `rlgen doctor` checks all of them")
    echo(f"{path}: valid")


def looked_up(loaded: LoadedRecipe, imports: bool = True) -> set[str] | None:
    """Returns the columns of the data; None: the data must be loaded to know them. Imports the user's rewards and tools, in a
    process of their own, unless `imports` is false.

    Raises:
        RecipeError: a file, a column or a function is not there, or a reward cannot be imported.
    """
    if problems := missing_files(loaded):
        raise RecipeError(problems)
    columns = known_columns(loaded.recipe)
    if problems := [*unknown_columns(loaded, columns), *unfilled_parameters(loaded, columns)]:
        raise RecipeError(problems)
    if imports and (problems := [*unusable_rewards(loaded), *unusable_tools(loaded)]):
        raise RecipeError(problems)
    return columns


def look_at_evaluation(held: LoadedRecipe, imports: bool) -> None:
    """Checks the data and the rewards of the evaluations, as `of_evaluation` returns them. Raises RecipeError as `looked_up`."""
    try:
        looked_up(held, imports)
    except RecipeError as error:
        problems = [
            replace(problem, what=of_eval(problem.what), hint=problem.hint and of_eval(problem.hint))
            for problem in error.problems
        ]
        raise RecipeError(problems) from None


def of_eval(text: str) -> str:
    """Returns a message about a key of `data` as one about that key of `eval`."""
    return text.replace("data.", "eval.", 1)


def unread(recipe: Recipe, columns: set[str] | None, folder: Path) -> list[str]:
    """Returns a line for what is not opened here, and why. `folder`: of the recipe, where its relative paths start."""
    said = []
    if columns is None:
        said.append(f"{recipe.data.source} was not read; `rlgen rewards test` checks its columns against the rewards")
    if not is_here(recipe.model.path):
        hint = like(str(folder / recipe.model.path)) if (folder / recipe.model.path).parent != folder else None
        said.append(
            f"model.path {recipe.model.path} is not a folder, so it must be a name of the hub, which was not asked"
            + (f"; {hint}" if hint else "")
        )
    return said


def is_here(path: str) -> bool:
    """Returns whether a model is a local folder or a tiny model."""
    return path.startswith("tiny:") or is_local_model(path) or Path(path).is_absolute()


def can_open(recipe: Recipe) -> bool:
    """Returns whether data and model are on this machine, with the packages that read them."""
    sources = [recipe.data.source, *([data_of(recipe, recipe.eval).source] if recipe.eval else [])]
    local = all(source.startswith("task:") or is_local_source(source) for source in sources)
    return local and is_here(recipe.model.path) and all(find_spec(name) for name in NEEDED)


def opened(recipe: Recipe) -> "Data | None":
    """Returns data and tokenizer as a run opens them; None where their packages cannot be imported."""
    try:
        from rlgen.setup.data import open_data
    except ImportError as error:
        echo(f"note: prompts are not shown: {error}")
        return None
    return open_data(recipe)


def rendered(data: "Data", count: int) -> list[Rendered]:
    """Returns the first prompts in the order of training."""
    prompts = data.prompts.take(0, min(count, len(data.prompts)))
    return [Rendered(prompt.row, prompt.text, prompt.prompt_ids.tolist()) for prompt in prompts]


def of_data(data: "Data | None", shown: list[Rendered]) -> dict[str, Any]:
    """Returns what was found in the data, for JSON."""
    if data is None:
        return {"data": None}
    prompts = [{"row": prompt.row, "text": prompt.text, "ids": prompt.ids} for prompt in shown]
    found = {"counts": dict(data.prompts.counts), "longest": data.prompts.longest, "warnings": list(data.warnings)}
    return {"data": found | {"notices": list(data.notices), "prompts": prompts}, "eval": of_held_out(data.held_out)}


def of_held_out(held_out: "HeldOut | None") -> dict[str, Any] | None:
    """Returns what was found in the data of evaluations, for JSON; None if nothing is evaluated."""
    if held_out is None:
        return None
    prompts = held_out.prompts
    return {"counts": dict(prompts.counts), "longest": prompts.longest, "trained_on_too": held_out.overlap}


def show(data: "Data", shown: list[Rendered]) -> None:
    """Prints what was found in the data, and the first prompts as text and ids."""
    from rlgen.data import listed

    echo(f"data: {listed(data.prompts.counts)}; the longest prompt has {data.prompts.longest} tokens")
    if data.held_out is not None:
        held = data.held_out.prompts
        echo(f"eval: {listed(held.counts)}; {data.held_out.overlap} are trained on, too; the longest has {held.longest} tokens")
    for line in data.notices:
        echo(f"note: {line}")
    for line in data.warnings:
        echo(f"warning: {line}")
    for prompt in shown:
        echo(f"prompt of row {prompt.row}, {len(prompt.ids)} tokens:")
        for line in prompt.text.split("\n"):
            echo(f"  | {line}")
        echo(f"  {ids_shown(prompt.ids)}")


def ids_shown(ids: list[int]) -> str:
    """Returns the ids of a prompt as text; of a long one the first and the last."""
    if len(ids) <= IDS_SHOWN + LAST_IDS:
        return " ".join(map(str, ids))
    return f"{' '.join(map(str, ids[:IDS_SHOWN]))} … {' '.join(map(str, ids[-LAST_IDS:]))}"


def plan(recipe: Recipe) -> str:
    """Returns one line that says what each step will be."""
    rollout, trainer = recipe.rollout, recipe.trainer
    updates = trainer.updates_per_rollout
    tools = ", ".join(tool.label for tool in recipe.tools)
    others = f"the tools {tools}" if tools else f"the environment {recipe.environment.use}" if recipe.environment else ""
    turns = f", in at most {rollout.max_turns} turns with {others}" if others else ""
    return (
        f"{recipe.run.steps} steps of {trainer.kind}: {rollout.prompts_per_step} prompts × {rollout.group_size} ="
        f" {recipe.samples_per_step} samples by the {recipe.engine.kind} engine{turns},"
        f" {updates} update{'s' if updates > 1 else ''} each in micro-batches of at most"
        f" {recipe.optim.micro_batch_tokens} tokens; into {recipe.run_path}"
    )
