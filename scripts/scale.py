"""What a large step costs beside the GPUs: 512 prompts x 16 completions of 8,192 tokens, 64 processes.

    python scripts/scale.py             each stage on the main process's share of it, and the sum
    python scripts/scale.py --rows      also a million rows of data, the client of a server, and a save (a few minutes)

Each stage is rlgen's own function on the share of one process, about a million synthetic tokens; what comes from the other 63
processes is a copy of it. The last line reads `scale: N s on the main process, M GiB in the largest process`.
"""

import argparse
import random
import resource
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import saves
import scale_data
import torch
from answers import URL, asking, synthetic
from measure_rollouts import measure
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlgen.algorithms.registry import build_algorithm
from rlgen.engines.answer import read_answer
from rlgen.engines.base import EngineCapabilities
from rlgen.losses.correction import Mismatch, importance_weight
from rlgen.processes import Processes
from rlgen.recipe.trainers import GRPORecipe
from rlgen.rollout.answers import check_answers
from rlgen.rollout.batch import collate
from rlgen.rollout.sample import build_groups, requests_for
from rlgen.rollout.samples import Samples
from rlgen.rollout.table import RowTable
from rlgen.run.records import sample_metrics, staleness_metrics
from rlgen.sentinel.bounds import Bounds
from rlgen.sentinel.probe import Probe, TrainerSide
from rlgen.sentinel.watch import Watch
from rlgen.trainers.train_batch import TrainBatch
from rlgen.types import Completion, Group, Prompt, Sampling, ids_of, logp_of, one_span

WORLD, PROMPTS, GROUP, TOKENS, PROMPT_TOKENS = 64, 512, 16, 8192, 512
SHARE = PROMPTS // WORLD  # prompts of a process
VOCABULARY = 151_936
CPU = torch.device("cpu")
LIMIT_SUM, LIMIT_STAGE, LIMIT_GIB = 6.0, 2.0, 3.0


class Many(Processes):
    """The first of 64 processes, of which the others hold what it holds, under other group ids."""

    def gather(self, items: Sequence[Any]) -> list[Any]:
        every = [copy(item) for _ in range(self.world) for item in items]
        for place, rows in enumerate(every):
            if isinstance(rows, np.ndarray):
                rank = place // len(items)
                rows["holder"] = rank
                rows["group_id"] += rank * SHARE
        return every

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        return [bytes(bytearray(part)) for part in parts]  # a copy, as what is received is

    def total(self, values: Tensor, op: str = "sum") -> Tensor:
        return values * self.world if op == "sum" else values


def made_up_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens of four characters, as many as a real one has."""
    rng = random.Random(0)
    words = {"".join(rng.choices(string.ascii_lowercase + " ", k=4)) for _ in range(VOCABULARY)}
    vocabulary = {word: place for place, word in enumerate([*sorted(words), *map(str, range(VOCABULARY - len(words)))])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def made_up_answers(prompts: Sequence[Prompt], rng: np.random.Generator) -> list[Completion]:
    """Ids as frequent as words are, and log-probs as `log_softmax` gives them in float32: of logits near 20."""
    answers = []
    for prompt in prompts:
        for _ in range(GROUP):
            ids = (rng.zipf(1.2, TOKENS) % VOCABULARY).astype(np.int32)
            gap = rng.exponential(0.7, TOKENS).astype(np.float32)
            top = rng.normal(20, 3, TOKENS).astype(np.float32)
            answers.append(
                Completion(
                    token_ids=ids,
                    logp=np.minimum((top - gap) - top, 0).astype(np.float32),
                    finish_reason="length",
                    spans=one_span(TOKENS, 0),
                    prompt_ids=prompt.prompt_ids,
                )
            )
    return answers


@dataclass(slots=True)
class Table:
    """Prints a line for each stage, and adds up what the main process does."""

    seconds: float = 0.0
    slowest: float = 0.0

    def stage(self, name: str, work: Callable[[], Any], tokens: int, counts: bool = True, repeats: int = 3) -> Any:
        """Times `work`: the median of three."""
        took, result = [], None
        for _ in range(repeats):
            began = time.perf_counter()
            result = work()
            took.append(time.perf_counter() - began)
        self.line(name, statistics.median(took), tokens, counts)
        return result

    def line(self, name: str, seconds: float, tokens: int, counts: bool = True) -> None:
        """Prints the cost of a stage.

        Args:
            counts: whether it is part of the sum.
        """
        if counts:
            self.seconds += seconds
            self.slowest = max(self.slowest, seconds)
        print(f"{name:<52} {seconds * 1e9 / tokens:8.1f} ns a token {seconds:8.3f} s{'' if counts else '   (not in the sum)'}")


def peak_gib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def answers_to_arrays(table: Table, answers: Sequence[Completion], servers: bool) -> None:
    """From what the engine gives to arrays."""
    tokens = TOKENS * len(answers)
    if servers:
        for name, arrays in (("rlgen's server, binary", True), ("another server, JSON", False)):
            body = synthetic(TOKENS, arrays)
            table.stage(
                f"a server's answer parsed ({name})",
                lambda body=body, arrays=arrays: [read_answer(body, arrays, URL, lambda label: 3) for _ in answers],
                tokens,
                counts=arrays,
            )
        return
    lists = [(answer.token_ids.tolist(), answer.logp.tolist()) for answer in answers]
    table.stage("vLLM's lists to arrays", lambda: [(ids_of(ids), logp_of(logp)) for ids, logp in lists], tokens)


def step(table: Table, servers: bool) -> None:
    """All that the main process does of a step, stage by stage."""
    rng = np.random.default_rng(0)
    ids = [ids_of(rng.integers(0, VOCABULARY, PROMPT_TOKENS)) for _ in range(SHARE)]
    prompts = [
        Prompt(position=at, row=at, text="x " * 500, prompt_ids=one, columns={"answer": str(at)}) for at, one in enumerate(ids)
    ]
    sampling = Sampling(max_tokens=TOKENS, temperature=1.0, stop_ids=(VOCABULARY - 1,))
    requests = requests_for(prompts, GROUP, 0)
    answers, tokenizer = made_up_answers(prompts, rng), made_up_tokenizer()
    tokens = len(answers) * TOKENS
    processes = Many(rank=0, world=WORLD, device=CPU, timeout=0.0, group=None, store=None)
    answers_to_arrays(table, answers, servers)
    table.stage("answers compared with their requests", lambda: check_answers(requests, answers, sampling, 0), tokens)
    groups = table.stage(
        "groups, with their texts", lambda: build_groups(prompts, requests, answers, sampling, tokenizer), tokens
    )
    learn(table, groups, processes)


def scored(groups: Sequence[Group]) -> list[Any]:
    """The samples, with a reward that differs within each group."""
    return [
        replace(sample, rewards={"right": float(sample.sample_index % 2)}, reward=float(sample.sample_index % 2))
        for group in groups
        for sample in group.samples
    ]


def learn(table: Table, groups: Sequence[Group], processes: Processes) -> None:
    """From rewarded samples to what the optimizer sees."""
    rewarded = scored(groups)
    tokens = TOKENS * len(rewarded)
    algorithm = build_algorithm(GRPORecipe())
    samples = table.stage("samples to columns", lambda: Samples.of(rewarded), tokens)
    rows = table.stage("the table of all rows", lambda: RowTable.gather(samples, processes), tokens)
    advantages = table.stage("advantages", lambda: algorithm.advantages(rows.scores({"right": 1.0})), tokens)
    train_batch = table.stage(
        "rows assigned to processes, sent, received",
        lambda: TrainBatch.of(rows, samples, advantages, 0.0, 16384, processes, False),
        tokens,
    )
    batches = table.stage(
        "micro-batches", lambda: [collate(train_batch.samples, one, CPU) for one in train_batch.micro_batches], tokens
    )
    parts = table.stage(
        "importance weights and drift, log-probs stored",
        lambda: [drift(train_batch, batch, algorithm) for batch in batches],
        tokens,
    )
    table.stage("metrics of the drift", lambda: Mismatch.of_train_batch(parts).metrics(processes.total), tokens)
    nobody: Any = None  # the look compares numbers; neither a model nor an engine is asked while they agree
    engine: Any = SimpleNamespace(abilities=EngineCapabilities())
    watch = Watch(
        probe=Probe(
            trainer=TrainerSide(policy=nobody, budget=0, processes=processes, engine_dtype=None, engine_holds=None),
            engine=engine,
            **dict.fromkeys(("engine_share", "expected", "tokenizer"), nobody),
            sampling=Sampling(max_tokens=1, temperature=1.0, stop_ids=()),
            prompts=(),
            given=Bounds(max_delta=1e-4),
            most=nobody,
            noise=None,
            seed=0,
            version=0,
        ),
        warns=True,
        sleeps=False,
        probe_every=None,
        drain=lambda: None,
        say=print,
    )
    train_batch.frozen["old_at_sampling"] = torch.from_numpy(train_batch.samples.sampler_logp.values) + 1e-6
    table.stage("the sentinel's look", lambda: watch(train_batch.samples, train_batch.flat("old_at_sampling"), 1), tokens)
    table.stage("metrics of the samples", lambda: (sample_metrics(rows), staleness_metrics(rows, 0, 0)), tokens)


def drift(train_batch: TrainBatch, batch: Any, algorithm: Any) -> Mismatch:
    """What the updater does of a micro-batch besides the model and the loss."""
    logp = batch.sampler_logp + 1e-6
    train_batch.put("old_logp", batch, logp)
    train_batch.put("old_at_sampling", batch, logp)
    old = train_batch.get("old_at_sampling", batch)
    weight = importance_weight(old, batch.sampler_logp, batch.mask, algorithm.correction)
    train_batch.get("old_logp", batch)
    return Mismatch.of(logp, batch.sampler_logp, weight, batch.mask, algorithm.correction)


def on_disk(table: Table, folder: Path) -> dict[str, float]:
    """Journal and rollouts, in CPU time of the whole process: the second are written by a thread beside the loop."""
    tokens = SHARE * GROUP * TOKENS
    measure(16_000, folder / "first")  # imports, and the first pages of memory, are no cost a token
    found = measure(tokens, folder / "second")
    for name in ("journal", "text", "rollouts"):
        what = {
            "journal": "journal",
            "text": "rollouts: their text is written",
            "rollouts": "rollouts: the rest is written, by a thread",
        }[name]
        table.line(what, found[f"{name}, ns a token"] * tokens / 1e9, tokens)
    # A resumed process reads the records of all processes, and keeps its own.
    table.line(
        "resume: the journals of all processes read",
        found["journal read, ns a token"] * tokens * WORLD / 1e9,
        tokens * WORLD,
        False,
    )
    return found


def beside() -> None:
    """What a start, a server's client and a save cost."""
    for count in (1024, 4096):
        print(f"{count} requests at once: {asking(count):.2f} ms of CPU time a request")
    with tempfile.TemporaryDirectory() as folder:
        saved = saves.measure(Path(folder))
        print(f"a save of 50 M parameters stops the loop for {saved.share:.1%} of the save's time")
    for kind in (".jsonl", ".parquet"):
        with tempfile.TemporaryDirectory() as folder:
            rows = scale_data.measure(1_000_000, kind, Path(folder))
            print(
                f"a million prompts in a {kind} file: first start {rows.first.seconds:.0f} s, second {rows.second.seconds:.1f} s,"
                f" {rows.above / 2**20:.0f} MiB more memory than with one prompt"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="also data, a server's client and a save")
    torch.set_num_threads(1)
    rows = parser.parse_args().rows
    worst, bad = 0.0, []
    for servers in (False, True):
        print(f"\n{'servers' if servers else 'colocated'}: the main process's share, {SHARE * GROUP} rows of {TOKENS} tokens")
        table = Table()
        step(table, servers)
        with tempfile.TemporaryDirectory() as folder:
            found = on_disk(table, Path(folder))
        print(f"{'sum':<52} {'':>19} {table.seconds:8.3f} s")
        worst = max(worst, table.seconds)
        bad += [f"a stage takes {table.slowest:.1f} s"] if table.slowest > LIMIT_STAGE else []
    print(f"\nrollouts on disk: {found['rollouts, bytes a token']:.2f} bytes a token, texts and both log-probs included")
    if rows:
        beside()
    bad += [f"the sum is {worst:.1f} s"] if worst > LIMIT_SUM else []
    bad += [f"{peak_gib():.1f} GiB"] if peak_gib() > LIMIT_GIB else []
    if bad:
        print(f"too much: {', '.join(bad)}")
    print(f"scale: {worst:.2f} s on the main process, {peak_gib():.2f} GiB in the largest process")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
