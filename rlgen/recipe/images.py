"""Checks recipes whose prompts hold images."""

from rlgen.recipe.data import TASK_COLUMNS
from rlgen.recipe.engines import ColocatedEngineRecipe, ServerEngineRecipe
from rlgen.recipe.models import Recipe
from rlgen.recipe.rules import Finding


def image_contradictions(recipe: Recipe) -> list[Finding]:
    """Returns what cannot be used together with images."""
    columns = recipe.eval.columns if recipe.eval is not None else None
    if recipe.data.columns.images is None and recipe.task is not None and "images" in TASK_COLUMNS.get(recipe.task, ()):
        what = f"{recipe.data.source} asks about pictures, but data.columns.images names no column"
        return [Finding("data.source", what, "add `columns: {images: images}` to data, and take a model that reads images")]
    if recipe.data.columns.images is None:
        if columns is None or columns.images is None:
            return []
        what = "eval.columns.images names a column, but data.columns.images none: the engine would be opened without images"
        return [Finding("eval.columns.images", what, "name a column in data.columns.images, too, or remove it")]
    found: list[Finding] = []
    engine, model, processes = recipe.engine, recipe.model, recipe.processes
    here = engine if isinstance(engine, ColocatedEngineRecipe) else None
    for path, meets, hint in (
        ("engine.kind server", isinstance(engine, ServerEngineRecipe), "set engine.kind to colocated or transformers"),
        ("engine.tensor_parallel_size above 1", here is not None and here.tensor_parallel_size > 1, "set it to 1"),
        ("engine.model_impl transformers", here is not None and here.model_impl == "transformers", "remove it"),
        ("tools", bool(recipe.tools), "remove tools, or the column"),
        ("environment", recipe.environment is not None, "remove environment, or the column"),
        ("rollout.use", recipe.rollout.use is not None, "remove it, or the column"),
        ("rollout.stream true", recipe.rollout.stream, "remove it"),
        ("model.lora", model.lora is not None, "remove it: all weights of the language model are then trained"),
        ("model.compile", model.compile, "remove it"),
        ("optim.packing true", recipe.optim.packing is True, "remove it"),
        ("processes.strategy fsdp", processes.strategy == "fsdp", "set it to ddp"),
        ("run.probe_max", recipe.run.probe_max, "remove it: it tries rows of text only"),
    ):
        if meets:
            what = f"data.columns.images: prompts with images are not tested with {path}"
            found.append(Finding(path.split()[0], what, hint))
    return found
