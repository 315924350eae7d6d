"""`make parity`: do vLLM and the trainer compute the same log-probs, for every tiny model, after a sync of changed weights?

    python scripts/parity.py                          # all of rlgen.models.tiny
    python scripts/parity.py qwen3-tied gemma2-tied

Each model is opened by both sides in float32, sampled by vLLM and scored by the trainer: at the start, after every tensor was
changed and sent, and after the first ones were sent again. Exits with 1 if the log-probs of any sampled token differ by more than
1e-4 nats, or if the comparison is blind: a sync that did nothing must show, and so must any one tensor that stayed old.
"""

import argparse
import logging
import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from rlgen.engines.base import Engine
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.plan import EnginePlan
from rlgen.errors import EngineError
from rlgen.models.load import load_model, load_tokenizer, stop_ids
from rlgen.models.policy import Policy
from rlgen.models.tiny import ARCHITECTURES, build_tiny, names, parse_name
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.rollout.sample import rollout
from rlgen.rollout.score import score
from rlgen.sentinel.sync import send_weights
from rlgen.types import Prompt, Sample, Sampling, ids_of

BOUND = 1e-4  # nats, of any sampled token
POWER = 100  # bounds by which a sync that did nothing would show
LEAST = 5  # bounds by which any one tensor that stayed old would show
PROMPTS, LONGEST, TOKENS = 16, 48, 32  # longer than the windows of the tiny models
NOISE = 0.1  # of a changed tensor, relative to its root mean square
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Parity:
    """Largest differences of a sampled token's log-prob, in nats: between engine and trainer, or as named."""

    start: float  # with the weights both sides opened
    unsynced: float  # trainer changed, engine not
    changed: float  # after the changed weights were sent
    restored: float  # after the first weights were sent again
    least: float  # of the trainer alone, if one tensor had stayed old: the tensor that shows least

    @property
    def gap(self) -> float:
        """NaN if one of them is."""
        return torch.tensor([self.start, self.changed, self.restored]).max().item()

    @property
    def agrees(self) -> bool:
        return self.gap <= BOUND and self.unsynced >= POWER * BOUND and self.least >= LEAST * BOUND


def prompts() -> list[Prompt]:
    """Random bytes, of unequal lengths."""
    rng = random.Random(0)
    ids = [tuple(rng.randrange(256) for _ in range(rng.randrange(1, LONGEST))) for _ in range(PROMPTS)]
    return [Prompt(position=place, row=place, text="", prompt_ids=ids_of(row), columns={}) for place, row in enumerate(ids)]


def open_engine(folder: str) -> ColocatedEngine:
    recipe = Recipe.model_validate(
        {
            "run": {"name": "parity"},
            "model": {"path": folder, "dtype": "float32"},
            "data": {"source": "task:sort", "max_prompt_tokens": LONGEST},
            "rewards": [{"use": "exact_match"}],
            "rollout": {"prompts_per_step": PROMPTS, "group_size": 1, "max_completion_tokens": TOKENS},
            "engine": {"kind": "colocated"},
        }
    )
    return ColocatedEngine(EnginePlan.of(recipe.engine_needs, folder), wait=None)


@torch.no_grad()
def change(tensors: Iterable[Tensor]) -> None:
    """Adds noise to every tensor, to those of zeros too."""
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors:
        size = NOISE * max(tensor.square().mean().sqrt().item(), 0.3)
        tensor.add_(size * torch.randn(tensor.shape, generator=generator))


def measure(name: str) -> Parity:
    """Opens the tiny model `name` on both sides and compares them."""
    folder = str(build_tiny(name))
    tokenizer = load_tokenizer(folder, None)
    policy = Policy(load_model(folder, None, torch.float32, "sdpa", CPU), torch.float32, True)
    sampling = Sampling(max_tokens=TOKENS, temperature=1.0, stop_ids=stop_ids(tokenizer, folder, None))
    engine: Engine = open_engine(folder)

    def sample() -> list[Sample]:
        groups = rollout(engine, prompts(), sampling, 1, 0, engine.weight_version, tokenizer)
        return [sample for group in groups for sample in group.samples]

    def scored(samples: Sequence[Sample]) -> Tensor:
        return torch.cat(score(policy, samples, sampling.distribution, 4096, Processes.alone()))

    def gap(samples: Sequence[Sample]) -> float:
        reported = torch.cat([torch.from_numpy(sample.sampler_logp) for sample in samples])
        return (scored(samples) - reported).abs().max().item()

    try:
        # By torch's word, not by that of the code that sends them: what it forgets to send must show.
        tensors = policy.model.state_dict()
        first = {name: tensor.clone() for name, tensor in tensors.items()}
        samples = sample()
        start = gap(samples)
        change(tensors.values())
        unsynced = gap(samples)
        send_weights(engine, policy.model, 1, Processes.alone())
        samples = sample()
        changed = gap(samples)

        expected, least = scored(samples), math.inf
        for name, tensor in tensors.items():
            new = tensor.clone()
            tensor.copy_(first[name])
            least = min(least, (scored(samples) - expected).abs().max().item())
            tensor.copy_(new)

        for name, tensor in tensors.items():
            tensor.copy_(first[name])
        send_weights(engine, policy.model, 2, Processes.alone())
        return Parity(start, unsynced, changed, gap(sample()), least)
    finally:
        engine.close()


def tyings(chosen: Sequence[str]) -> dict[str, list[str]]:
    """(["qwen3-tied", "qwen3-untied"]) -> {"qwen3": ["qwen3-tied", "qwen3-untied"]}"""
    found: dict[str, list[str]] = {}
    for name in chosen:
        found.setdefault(parse_name(name)[0], []).append(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="tiny models, such as gemma2-tied; all of them if none is named")
    chosen = parser.parse_args().names or names()
    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # what it says about tiny models is known
    disable_progress_bar()
    torch.set_num_threads(1)  # more gain nothing on models of this size, and wait for each other on a busy machine
    failed = []
    print("| architecture | what is special | max \\|Δ\\|, tied | untied | nothing sent | one tensor stale |")
    print("|---|---|---|---|---|---|", flush=True)
    for base, group in tyings(chosen).items():
        gaps, found = {True: "–", False: "–"}, []
        for name in group:
            tied = parse_name(name)[1]
            try:
                one = measure(name)
            except EngineError as error:
                print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
                gaps[tied] = "failed"
                failed.append(name)
                continue
            found.append(one)
            gaps[tied] = f"{one.gap:.1e}"
            if not one.agrees:
                failed.append(name)
        unsynced = min((one.unsynced for one in found), default=math.nan)
        least = min((one.least for one in found), default=math.nan)
        cells = [base, ARCHITECTURES[base].special, gaps[True], gaps[False], f"{unsynced:.1f}", f"{least:.1g}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{len(chosen) - len(failed)} of {len(chosen)} models agree to {BOUND:g} nats")
    if failed:
        raise SystemExit(f"not as expected: {', '.join(failed)}")


if __name__ == "__main__":
    main()
