"""Says what is unusual in a valid recipe."""

import re
from urllib.parse import urlsplit

from rlgen.recipe.data import TASKS
from rlgen.recipe.engines import ServerEngineRecipe
from rlgen.recipe.models import Recipe
from rlgen.recipe.rules import is_loopback, servers
from rlgen.recipe.trainers import GRPORecipe

LARGE_RATE = 0.01  # learning rates above this are larger than any that trains a language model
LARGE_GROUP, LARGE_BATCH = 1024, 1 << 20  # completions of a prompt, tokens of a micro-batch
SMALL_FOR_LORA = 5e-6  # learning rates below this hardly change an adapter


def warnings(recipe: Recipe) -> list[str]:
    """Returns a line for each setting that is valid, but probably a mistake."""
    said: list[str] = []
    rate = recipe.optim.learning_rate
    if rate > LARGE_RATE:
        said.append(
            f"optim.learning_rate {rate:g} destroys a model in a few steps: usual are 1e-6 for all weights, 1e-5 to 1e-4 for"
            " adapters"
        )
    columns = recipe.data.columns
    if columns.answer is not None and columns.answer == columns.prompt:
        said.append(f"data.columns: prompt and answer are both `{columns.answer}`: rewards compare completions with the prompt")
    if recipe.data.source in TASKS:
        said.append(f"data.source {recipe.data.source} is a name of the hub; the task is task:{recipe.data.source}")
    if recipe.rollout.group_size > LARGE_GROUP:
        said.append(
            f"rollout.group_size {recipe.rollout.group_size}: a step samples {recipe.samples_per_step:,} completions; 4 to 64 a"
            " prompt are usual"
        )
    if recipe.optim.micro_batch_tokens > LARGE_BATCH:
        said.append(
            f"optim.micro_batch_tokens {recipe.optim.micro_batch_tokens:,} is more than a GPU holds at once; `rlgen estimate`"
            " says what fits"
        )
    return said


def notices(recipe: Recipe) -> list[str]:
    """Returns notes to print: settings that are harmless, and common in templates."""
    said: list[str] = []
    if recipe.checkpoint.every > recipe.run.steps:
        said.append(
            f"checkpoint.every {recipe.checkpoint.every} is above run.steps {recipe.run.steps}: only the last step is saved"
        )
    if recipe.engine.kind == "colocated" and recipe.engine.structured_regex is not None:
        said.append("engine.structured_regex: the sentinel checks the engine without it before step 1, and cannot check batches")
    if recipe.engine.kind == "colocated" and recipe.rollout.stream:
        said.append(
            "rollout.stream with engine.kind colocated: engine and trainer share one Python interpreter and wait for each other;"
            " a server has its own (engine.kind server, engine.launch true)"
        )
    if isinstance(recipe.engine, ServerEngineRecipe):
        hosts = [re.sub(r"^https?://|(:\d+)?(/.*)?$", "", url) for url in servers(recipe.engine) if url.startswith("http://")]
        hosts += [recipe.engine.host] if recipe.engine.launch else []
        for host in dict.fromkeys(host for host in hosts if not is_loopback(host)):
            said.append(f"engine: {host} is another machine, and http is not encrypted: use it in a trusted network only")
            if recipe.engine.transfer_dir is None and recipe.engine.transfer == "files" and not recipe.engine.launch:
                said.append(f"engine: {host} must read the weights from this machine; set engine.transfer_dir to a shared folder")
        outside = [url for url in servers(recipe.engine) if not is_loopback(urlsplit(url).hostname or "")]
        if recipe.engine.transfer == "nccl" and outside:
            said.append(f"engine.transfer nccl to {outside[0]} has no token and no encryption: use it in a trusted network only")
    if recipe.model.lora is not None and recipe.optim.learning_rate < SMALL_FOR_LORA:
        said.append(
            f"optim.learning_rate {recipe.optim.learning_rate:g} is usual for full weights; adapters start at zero and need ten"
            " times as much or more"
        )
    trainer = recipe.trainer
    if isinstance(trainer, GRPORecipe) and trainer.loss in ("gspo", "luspo") and "token" in trainer.correction.mode:
        said.append(
            f"trainer.loss {trainer.loss} has one ratio for a completion; trainer.correction.mode {trainer.correction.mode}"
            " weighs it by the mean of its tokens' weights"
        )
    return said
