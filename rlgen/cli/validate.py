"""Checks a recipe without running it: `rlgen validate`.

Mistakes in the recipe itself are found without heavy imports. Then the local files of data, model and rewards are opened, and the
first prompts are shown as the model will see them.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlgen.cli.files import looked_up, of_evaluation
from rlgen.cli.output import echo
from rlgen.errors import Problem, RecipeError
from rlgen.recipe import Recipe, load_recipe
from rlgen.recipe.evaluation import data_of, of_eval
from rlgen.recipe.paths import like
from rlgen.recipe.rules import is_local_model, is_local_source
from rlgen.run.sinks.open import check_libraries

if TYPE_CHECKING:
    from rlgen.setup.data import Data
    from rlgen.types import Prompt

IDS_SHOWN = 24  # ids of a prompt that are shown from its start; the last ones follow
LAST_IDS = 4
NEEDED = ("torch", "transformers", "datasets")  # packages without which prompts cannot be rendered


def validate_command(path: Path, overrides: list[str], as_json: bool, count: int) -> None:
    """Checks a recipe, and prints what was found. With `count` 0 prompts to show, neither model nor data are opened."""
    loaded = load_recipe(path, overrides)
    check_libraries(loaded.recipe)
    columns = looked_up(loaded)
    if (held := of_evaluation(loaded)) is not None:
        try:
            looked_up(held, imports=loaded.recipe.eval is not None and loaded.recipe.eval.rewards is not None)
        except RecipeError as error:  # about keys of `data`, which are here those of `eval`
            problems = [Problem(one.where, of_eval(one.what), one.hint and of_eval(one.hint)) for one in error.problems]
            raise RecipeError(problems) from None
    recipe, warnings = loaded.recipe, list(loaded.warnings)
    notices = [*loaded.notices, *unread(recipe, columns, path.resolve().parent)]
    if not as_json:
        for kind, lines in (("warning", warnings), ("note", notices)):
            for line in lines:
                echo(f"{kind}: {line}")
        echo(steps_of(recipe))
    data = None
    if count and can_open(recipe):
        try:
            from rlgen.models.load import without_values
            from rlgen.models.lora import targets
            from rlgen.setup.data import open_data, open_dialogue
        except ImportError as error:
            echo(f"note: prompts are not shown: {error}")
        else:
            data = open_data(recipe)
            if recipe.model.lora is not None:
                targets(without_values(data.location, recipe.model.revision), recipe.model.lora.targets)
            if recipe.tools and (dialogue := open_dialogue(recipe, data.tokenizer, data.stop_ids, None)) is not None:
                dialogue.turns.close()
    shown = [] if data is None else list(data.prompts.take(0, min(count, len(data.prompts))))
    if as_json:
        report = {"valid": True, "recipe": str(path), "notices": notices, "warnings": warnings, "plan": steps_of(recipe)}
        echo(json.dumps(report | of_data(data, shown)))
        return
    if data is not None:
        print_data(data, shown)
    looked = "the model's weights" if data is not None else "rows of the data, the model"
    echo(f"not checked: {looked}, the GPU; `rlgen doctor` checks all of them")
    echo(f"{path}: valid")


def unread(recipe: Recipe, columns: set[str] | None, folder: Path) -> Iterator[str]:
    """Yields a line for what is not opened here, and why. `folder`: of the recipe, where its relative paths start."""
    if columns is None:
        yield f"{recipe.data.source} was not read; `rlgen rewards test` checks its columns against the rewards"
    if not is_here(recipe.model.path):
        hint = like(str(folder / recipe.model.path)) if (folder / recipe.model.path).parent != folder else None
        what = f"model.path {recipe.model.path} is not a folder, so it must be a name of the hub, which was not asked"
        yield f"{what}; {hint}" if hint else what


def is_here(path: str) -> bool:
    return path.startswith("tiny:") or is_local_model(path)


def can_open(recipe: Recipe) -> bool:
    """Returns whether data and model are on this machine, with the packages that read them."""
    sources = [recipe.data.source, *([data_of(recipe.eval, recipe.data).source] if recipe.eval else [])]
    local = all(source.startswith("task:") or is_local_source(source) for source in sources)
    return local and is_here(recipe.model.path) and all(find_spec(name) for name in NEEDED)


def of_data(data: "Data | None", shown: "list[Prompt]") -> dict[str, Any]:
    """Returns what was found in the data, for JSON."""
    if data is None:
        return {"data": None}
    prompts = [{"row": prompt.row, "text": prompt.text, "ids": prompt.prompt_ids.tolist()} for prompt in shown]
    found = {"counts": dict(data.prompts.counts), "longest": data.prompts.longest, "warnings": list(data.warnings)}
    held = None
    if data.held_out is not None:
        rows = data.held_out.prompts
        held = {"counts": dict(rows.counts), "longest": rows.longest, "trained_on_too": data.held_out.overlap}
    return {"data": found | {"notices": list(data.notices), "prompts": prompts}, "eval": held}


def print_data(data: "Data", shown: "list[Prompt]") -> None:
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
        ids = [str(one) for one in prompt.prompt_ids]
        echo(f"prompt of row {prompt.row}, {len(ids)} tokens:")
        for line in prompt.text.split("\n"):
            echo(f"  | {line}")
        if len(ids) > IDS_SHOWN + LAST_IDS:
            ids = [*ids[:IDS_SHOWN], "…", *ids[-LAST_IDS:]]
        echo(f"  {' '.join(ids)}")


def steps_of(recipe: Recipe) -> str:
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
