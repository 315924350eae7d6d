"""Says what is unusual in a valid recipe."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from rlgen.recipe.data import TASKS
from rlgen.recipe.engines import ServerEngineRecipe
from rlgen.recipe.models import Recipe
from rlgen.recipe.rules import is_loopback, servers
from rlgen.recipe.trainers import GRPORecipe

LARGE_RATE = 0.01  # learning rates above this are larger than any that trains a language model
LARGE_GROUP, LARGE_BATCH = 1024, 1 << 20  # completions of a prompt, tokens of a micro-batch
SMALL_FOR_LORA = 5e-6  # learning rates below this hardly change an adapter


def warnings(recipe: Recipe) -> Iterator[str]:
    """Yields a line for each setting that is valid, but probably a mistake."""
    rate, columns, group = recipe.optim.learning_rate, recipe.data.columns, recipe.rollout.group_size
    if rate > LARGE_RATE:
        usual = "usual are 1e-6 for all weights, 1e-5 to 1e-4 for adapters"
        yield f"optim.learning_rate {rate:g} destroys a model in a few steps: {usual}"
    if columns.answer is not None and columns.answer == columns.prompt:
        yield f"data.columns: prompt and answer are both `{columns.answer}`: rewards compare completions with the prompt"
    if recipe.data.source in TASKS:
        yield f"data.source {recipe.data.source} is a name of the hub; the task is task:{recipe.data.source}"
    if group > LARGE_GROUP:
        yield f"rollout.group_size {group}: a step samples {recipe.samples_per_step:,} completions; 4 to 64 a prompt are usual"
    if recipe.optim.micro_batch_tokens > LARGE_BATCH:
        what = f"optim.micro_batch_tokens {recipe.optim.micro_batch_tokens:,} is more than a GPU holds at once"
        yield f"{what}; `rlgen estimate` says what fits"


def notices(recipe: Recipe) -> Iterator[str]:
    """Yields notes to print: settings that are harmless, and common in templates."""
    trainer, engine, steps, rate = recipe.trainer, recipe.engine, recipe.run.steps, recipe.optim.learning_rate
    if recipe.checkpoint.every > steps:
        yield f"checkpoint.every {recipe.checkpoint.every} is above run.steps {steps}: only the last step is saved"
    if recipe.structured_regex is not None:
        yield "engine.structured_regex: the sentinel checks the engine without it before step 1, and cannot check batches"
    if engine.kind == "colocated" and recipe.rollout.stream:
        what = "engine and trainer share one Python interpreter and wait for each other"
        yield f"rollout.stream with engine.kind colocated: {what}; a server has its own (engine.kind server, engine.launch true)"
    if isinstance(engine, ServerEngineRecipe):
        yield from _of_servers(engine)
    if recipe.model.lora is not None and rate < SMALL_FOR_LORA:
        yield f"optim.learning_rate {rate:g} is usual for full weights; adapters start at zero and need ten times as much or more"
    if isinstance(trainer, GRPORecipe) and trainer.loss in ("gspo", "luspo") and "token" in trainer.correction.mode:
        what = f"trainer.loss {trainer.loss} has one ratio for a completion; trainer.correction.mode {trainer.correction.mode}"
        yield f"{what} weighs it by the mean of its tokens' weights"


def _of_servers(engine: ServerEngineRecipe) -> Iterator[str]:
    """Yields notes about servers on other machines."""
    trusted, urls = "use it in a trusted network only", servers(engine)
    hosts = [re.sub(r"^https?://|(:\d+)?(/.*)?$", "", url) for url in urls if url.startswith("http://")]
    hosts += [engine.host] if engine.launch else []
    for host in dict.fromkeys(host for host in hosts if not is_loopback(host)):
        yield f"engine: {host} is another machine, and http is not encrypted: {trusted}"
        if engine.transfer_dir is None and engine.transfer == "files" and not engine.launch:
            yield f"engine: {host} must read the weights from this machine; set engine.transfer_dir to a shared folder"
    outside = [url for url in urls if not is_loopback(urlsplit(url).hostname or "")]
    if engine.transfer == "nccl" and outside:
        yield f"engine.transfer nccl to {outside[0]} has no token and no encryption: {trusted}"
