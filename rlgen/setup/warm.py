"""Makes a model to start from, by a short supervised phase on the answers of the data (for a built-in task, on other rows).

RL needs a model that succeeds now and then, but a random one never does. A tiny model takes less than a minute on two cores.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlgen.data import build_prompts
from rlgen.engines.transformers import TransformersEngine
from rlgen.errors import CheckpointError, SetupError
from rlgen.models.load import load_model, locate, stop_ids
from rlgen.recipe import Recipe
from rlgen.recipe.evaluation import data_of
from rlgen.rollout.batch import pad_rows
from rlgen.rollout.conversations import Dialogue
from rlgen.rollout.environment import EnvironmentTurns
from rlgen.rollout.sample import rollout
from rlgen.rollout.tools import ToolTurns
from rlgen.setup.data import open_dialogue, open_tokenizer, rows_of
from rlgen.tools.box import schemas_of
from rlgen.types import Prompt, Sampling

Asked = ToolTurns | EnvironmentTurns

BATCH = 64  # rows of a step
EVERY, TESTED = 5, 128  # steps between two measurements, and prompts of each
MOST_STEPS, LEARNING_RATE = 1500, 2e-3
ASKS = 3  # with tools or an environment, one row in ASKS calls it first; the others answer at once, so that the model may choose
TRAIN_SEED, TEST_SEED = 1001, 2002  # other rows than those of a run


def warm_start(recipe: Recipe, out: Path, accuracy: float, say: Callable[[str], None]) -> float:
    """Trains the recipe's model on the answers of its data until it answers enough prompts right, and saves it.

    It is tested on the prompts of the recipe's evaluation; without one on other rows of its task, or else on those of the data.
    """
    if recipe.data.columns.images is not None:
        raise SetupError("data.columns.images: a warm start trains on texts only; take a model that has learned to read images")
    location = locate(recipe.model.path)
    tokenizer = open_tokenizer(recipe.model, recipe.data.chat_template, location)
    tools = schemas_of(recipe.tools, recipe.scoring)
    held_out = recipe.data if recipe.eval is None or recipe.task is not None else data_of(recipe.eval, recipe.data)
    learn, test = (
        build_prompts(data, rows_of(data, seed, recipe.environment, recipe.scoring), tokenizer, seed, tools=tools)
        for data, seed in ((recipe.data, TRAIN_SEED), (held_out, TEST_SEED))
    )
    model = load_model(location, recipe.model.revision, torch.float32, "sdpa", torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    ends = stop_ids(tokenizer, location, recipe.model.revision)
    sampling = Sampling(max_tokens=recipe.rollout.max_completion_tokens, temperature=1.0, stop_ids=ends)
    tested, right, step = test.take(0, TESTED), 0.0, 0
    with ExitStack() as opened:
        dialogue = open_dialogue(recipe, tokenizer, ends, None)
        turns = None if dialogue is None else dialogue.turns
        if turns is not None:
            opened.callback(turns.close)
            assert isinstance(turns, Asked)
        while right < accuracy:
            if step == MOST_STEPS:
                raise SetupError(f"{right:.0%} of the answers are right after {step} steps, not {accuracy:.0%}; lower --accuracy")
            loss = supervised_loss(model, tokenizer, learn.take(step * BATCH, BATCH), turns)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % EVERY == 0:
                right = share_right(model, tokenizer, tested, sampling, dialogue)
                say(f"step {step}  loss {loss.item():.3f}  right {right:.2f}")
    try:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}; free space or name another folder with --out") from error
    return right


def supervised_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], turns: Asked | None = None
) -> torch.Tensor:
    """Returns the mean cross entropy of the answers' ids, the ends of turns among them.

    With `turns`, one row in `ASKS` calls it first, and its reply is not learned.
    """
    rows, labels = [], []
    asked: list[tuple[list[int], list[int]]] = [([], [])] * len(prompts)
    if turns is not None:
        asked[::ASKS] = turns.demonstrated(prompts[::ASKS])
    for prompt, (call, reply) in zip(prompts, asked, strict=True):
        answer = [*tokenizer(prompt.columns["answer"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append(torch.tensor([*prompt.prompt_ids, *call, *reply, *answer]))
        labels.append(torch.tensor([-100] * len(prompt.prompt_ids) + call + [-100] * len(reply) + answer))
    logits = model(input_ids=pad_rows(rows, 0), use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), pad_rows(labels, -100)[:, 1:].flatten())


def share_right(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    dialogue: Dialogue | None,
) -> float:
    engine = TransformersEngine(model=model, fp32_head=True, max_num_seqs=TESTED)
    groups = rollout(engine, prompts, sampling, 1, 0, engine.weight_version, tokenizer, dialogue)
    model.requires_grad_(True)  # the engine has frozen it
    right = [group.samples[0].completion == group.prompt.columns["answer"] for group in groups]
    return sum(right) / len(right)
