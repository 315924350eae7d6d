"""Engines that are given images: the ids that they report are those of the row, and their log-probs the trainer's."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CPU
from helpers.adapters import gap
from helpers.pictures import MODEL, asked, picture, vision
from helpers.recipes import recipe_for

from rlgen.engines.base import Engine
from rlgen.engines.open import build_engine
from rlgen.errors import SentinelError, SetupError
from rlgen.models.load import load_model, locate
from rlgen.models.policy import Policy
from rlgen.models.vision import of_vision
from rlgen.processes import Processes
from rlgen.rollout.answers import check_answers
from rlgen.rollout.sample import build_groups
from rlgen.sentinel.sync import send_weights
from rlgen.types import Completion, Prompt, Request, Sample, Sampling

pytestmark = pytest.mark.vllm
BOUND = 1e-4  # nats, in float32
SAMPLING = Sampling(max_tokens=12, temperature=1.0, stop_ids=(257, 259))
# The same text about other pictures, no picture, several: the last prompt fills a block of the prefix cache.
ASKED = [("what?", (1,)), ("what?", (2,)), ("what?", ()), ("and this one?", (2, 3)), ("all of them?", (1, 2, 3, 4))]
ALONE = Processes.alone()


@pytest.fixture(scope="module", params=["colocated", "transformers"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    recipe = recipe_for(
        MODEL,
        engine={"kind": request.param},
        data={"source": "rows.jsonl", "columns": {"images": "images"}, "max_prompt_tokens": 300},
        rollout={"max_completion_tokens": 12},
    )
    opened = build_engine(recipe.engine_needs, locate(MODEL), ALONE, Path(), print)
    yield opened
    opened.close()


@pytest.fixture
def policy() -> Policy:
    return Policy(load_model(locate(MODEL), None, torch.float32, "sdpa", CPU), torch.float32, True, vision())


def requests(what: Sequence[tuple[str, tuple[int, ...]]] = ASKED, first_seed: int = 0) -> list[Request]:
    seen = vision()
    prompts = [asked(text, [picture(seed) for seed in pictures], seen) for text, pictures in what]
    return [Request(prompt_ids=ids, seed=first_seed + place, images=images) for place, (ids, images) in enumerate(prompts)]


def samples(asked_for: Sequence[Request], answers: Sequence[Completion], engine: Engine) -> list[Sample]:
    """Checked as those of a run are: by their prompt ids, too."""
    check_answers(asked_for, answers, SAMPLING, engine.weight_version)
    prompts = [
        Prompt(position=place, row=place, text="", prompt_ids=one.prompt_ids, columns={}, images=one.images)
        for place, one in enumerate(asked_for)
    ]
    decoder: Any = SimpleNamespace(decode=lambda ids, skip_special_tokens: "")  # the text is for people
    groups = build_groups(prompts, asked_for, answers, SAMPLING, decoder)
    return [sample for group in groups for sample in group.samples]


def test_engine_and_trainer_agree_with_a_warm_cache_too(engine: Engine, policy: Policy) -> None:
    """The second time blocks of prompts come from the prefix cache, whose key has the image in it."""
    every = requests()
    for round_ in range(2):
        answers = engine.generate(every, SAMPLING)
        found = samples(every, answers, engine)
        assert gap(policy, found) < BOUND
        if engine.facts().cache_block is not None:
            assert (answers[-1].cached_tokens > 0) is bool(round_)
    assert (found[0].prompt_ids == found[1].prompt_ids).all()
    assert gap(policy, [replace(found[0], images=found[1].images)]) > 100 * BOUND  # the other picture under the same ids


def test_other_pictures_under_the_same_ids_are_not_taken_from_the_cache(engine: Engine, policy: Policy) -> None:
    first = requests([("all of them?", (1, 2, 3, 4))], 7)
    other = requests([("all of them?", (1, 2, 3, 5))], 7)
    assert (first[0].prompt_ids == other[0].prompt_ids).all()
    engine.generate(first, SAMPLING)
    answers = engine.generate(other, SAMPLING)
    assert gap(policy, samples(other, answers, engine)) < BOUND


def test_prefilling_agrees(engine: Engine, policy: Policy) -> None:
    every = requests()
    found = samples(every, engine.generate(every, SAMPLING), engine)
    rows = [(sample.prompt_ids, sample.completion_ids) for sample in found]
    prefilled = engine.prefill_logp(rows, [sample.images for sample in found])
    assert max(np.abs(logp - one.sampler_logp).max() for logp, one in zip(prefilled, found, strict=True)) < BOUND


def test_a_sync_brings_the_vision_tower(engine: Engine, policy: Policy) -> None:
    """Only its weights and the projector's have changed, as with model.train_vision."""
    every, version = requests(), engine.weight_version
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    with torch.no_grad():
        for parameter in of_vision(policy.model):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter += 0.1 * parameter.std(unbiased=False) * noise
    found = samples(every, engine.generate(every, SAMPLING), engine)
    assert gap(policy, [found[2]]) < BOUND < 100 * BOUND < gap(policy, found[:2])  # the text is as it was
    send_weights(engine, policy.model, version + 1, ALONE)
    assert gap(policy, samples(every, engine.generate(every, SAMPLING), engine)) < BOUND
    policy.model.load_state_dict(before)
    send_weights(engine, policy.model, version + 2, ALONE)
    assert gap(policy, samples(every, engine.generate(every, SAMPLING), engine)) < BOUND


def test_a_picture_of_another_size_is_noticed(engine: Engine) -> None:
    """vLLM reports the ids that it used; the transformers engine finds other ids than the row has."""
    ids, images = asked("what?", [picture(1, 60, 20)], vision())
    other = replace(images[0], data=picture(1), sha256="other")
    assert images[0].stop - images[0].start != len(vision().ids(picture(1)))
    wrong = Request(prompt_ids=ids, seed=0, images=(other,))
    with pytest.raises((SentinelError, SetupError), match=r"dropped, repeated or changed|but the prompt has"):
        check_answers([wrong], engine.generate([wrong], SAMPLING), SAMPLING, engine.weight_version)
