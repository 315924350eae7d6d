"""`make parity`: do vLLM and the trainer compute the same log-probs, for every tiny model, after a sync of changed weights?

    python scripts/parity.py                          # all of rlgen.models.tiny
    python scripts/parity.py qwen3-tied gemma2-tied

Each model is opened by both sides in float32, sampled by vLLM and scored by the trainer: at the start, with every trainer tensor
changed and the engine not, after the changed weights were sent, and after the first ones were sent again. Exits with 1 if the
largest gap of any sampled token is above 1e-4 nats, or if the change would not have shown.
"""

import argparse
import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlgen.engines import Engine
from rlgen.engines.colocated import ColocatedEngine
from rlgen.errors import RlgenError
from rlgen.models.load import load_model, load_tokenizer, stop_ids
from rlgen.models.policy import Policy
from rlgen.models.tiny import ARCHITECTURES, build_tiny, names, parse_name
from rlgen.models.weights import checkpoint_tensors, own_tensors
from rlgen.rollout.sample import rollout
from rlgen.rollout.score import score
from rlgen.types import Prompt, Sample, Sampling

BOUND = 1e-4  # nats, of any sampled token
POWER = 100  # a change must move log-probs by this many bounds: a sync that did nothing would show
PROMPTS, LONGEST, TOKENS = 16, 48, 32  # longer than the windows of the tiny models
NOISE = 0.1  # of a changed tensor, relative to its root mean square
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Parity:
    """Largest |engine - trainer| log-prob of a sampled token, in nats."""

    start: float  # with the weights both sides opened
    unsynced: float  # trainer changed, engine not
    changed: float  # after the changed weights were sent
    restored: float  # after the first weights were sent again

    @property
    def agrees(self) -> bool:
        same = all(gap <= BOUND for gap in (self.start, self.changed, self.restored))  # NaN is not
        return same and self.unsynced >= POWER * BOUND


def prompts() -> list[Prompt]:
    """Random bytes, of unequal lengths."""
    rng = random.Random(0)
    ids = [tuple(rng.randrange(256) for _ in range(rng.randrange(1, LONGEST))) for _ in range(PROMPTS)]
    return [Prompt(position=place, row=place, text="", prompt_ids=row, columns={}) for place, row in enumerate(ids)]


def open_engine(folder: str) -> ColocatedEngine:
    return ColocatedEngine(
        model=folder,
        revision=None,
        dtype="float32",
        fp32_head=True,
        max_model_len=LONGEST + TOKENS,
        max_num_seqs=PROMPTS,
        kv_cache_gib=None,
        gpu_memory_utilization=None,
        tensor_parallel_size=1,
        sleep=False,
        model_impl="auto",
        quantization=None,
        structured_outputs=False,
        enforce_eager=None,
        extra={},
    )


@torch.no_grad()
def change(tensors: Iterable[Tensor]) -> None:
    """Adds noise to every tensor, to those of zeros too."""
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors:
        size = NOISE * max(tensor.square().mean().sqrt().item(), 0.1)
        tensor.add_(size * torch.randn(tensor.shape, generator=generator))


def measure(name: str) -> Parity:
    """Opens the tiny model `name` on both sides and compares them four times."""
    folder = str(build_tiny(name))
    tokenizer = load_tokenizer(folder, None)
    policy = Policy(load_model(folder, None, torch.float32, "sdpa", CPU), torch.float32, True)
    sampling = Sampling(max_tokens=TOKENS, temperature=1.0, stop_ids=stop_ids(tokenizer, folder, None))
    engine: Engine = open_engine(folder)
    try:

        def sample() -> list[Sample]:
            return [sample for group in rollout(engine, prompts(), sampling, 1, 0, tokenizer) for sample in group.samples]

        def gap(samples: Sequence[Sample]) -> float:
            logp = score(policy, samples, sampling.temperature, 4096, CPU)
            reported = torch.tensor([value for sample in samples for value in sample.sampler_logp])
            return (torch.cat(logp) - reported).abs().max().item()

        tensors = own_tensors(policy.model)
        first = {name: tensor.clone() for name, tensor in tensors.items()}
        before = sample()
        start = gap(before)
        change(tensors.values())
        unsynced = gap(before)
        engine.sync(checkpoint_tensors(policy.model), 1)
        changed = gap(sample())
        for name, tensor in tensors.items():
            tensor.copy_(first[name])
        engine.sync(checkpoint_tensors(policy.model), 2)
        return Parity(start, unsynced, changed, gap(sample()))
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="tiny models, such as gemma2-tied; all of them if none is named")
    chosen = parser.parse_args().names or names()
    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # what it says about tiny models is known
    torch.set_num_threads(1)  # more gain nothing on models of this size, and wait for each other on a busy machine
    failed = []
    print("| tiny model | what is special | moved by | start | changed | restored |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in chosen:
        special = ARCHITECTURES[parse_name(name)[0]].special
        try:
            found = measure(name)
        except RlgenError as error:
            failed.append(name)
            print(f"| {name} | {special} | {str(error).splitlines()[0]} | | | |", flush=True)
            continue
        if not found.agrees:
            failed.append(name)
        numbers = f"{found.unsynced:.2g} | {found.start:.1e} | {found.changed:.1e} | {found.restored:.1e}"
        print(f"| {name} | {special} | {numbers} |", flush=True)
    print(f"\n{len(chosen) - len(failed)} of {len(chosen)} agree to {BOUND:g} nats")
    if failed:
        raise SystemExit(f"not as expected: {', '.join(failed)}")


if __name__ == "__main__":
    main()
