"""Simulates how long a step takes: sampling with its tail of long completions, rewards, training, and the sync."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

STEPS, WARM = 40, 8  # simulated steps, and how many of them come before those that count
SPREAD = 0.6  # assumed: standard deviation of the logarithms of lengths
DOUBT = 0.02  # how strongly a fit holds to what is assumed where the steps hardly tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a step has to do."""

    completions: int
    prompts: int
    prompt_tokens: int  # of a prompt
    packed: bool  # whether a prompt is computed once for all its completions
    mean_tokens: float  # of a completion
    spread: float  # standard deviation of the logarithms of lengths, before they are cut off
    most_tokens: int  # of a completion
    engines: int  # that share the completions
    slots: int  # completions that an engine decodes at a time
    waves: bool  # whether all of them must end before others begin, as with transformers
    processes: int  # that train
    micro_batch_tokens: int
    updates: int  # passes over the rows
    ahead: int  # steps that are sampled while one trains
    in_flight: bool  # whether weights change under requests

    def trained(self, completion_tokens: float) -> float:
        """Returns the tokens that each process computes for a step of so many completion tokens."""
        copies = self.prompts if self.packed else self.completions
        return (completion_tokens + copies * self.prompt_tokens) / self.processes


@dataclass(frozen=True, slots=True)
class Rates:
    """What the parts of a step take, in seconds."""

    decode_step: float  # an engine's next token of all sequences, however many
    decode_token: float  # beyond that, of each sequence
    reward: float  # a completion
    train_token: float  # a token of a process
    micro_batch: float  # sending for a micro-batch, while it computes
    update: float  # once a pass over the rows: optimizer, and what is sent after the last micro-batch
    sync: float
    rest: float  # saving, and all else


def drawn_lengths(work: Work, random: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Draws lengths of `count` completions: log-normal, cut off at the most, with the mean that `work` has."""
    shape = np.exp(work.spread * np.random.default_rng(0).standard_normal(20_000))
    low, high = 0.0, 1e3 * work.most_tokens
    for _ in range(60):
        middle = (low + high) / 2
        below = np.clip(middle * shape, 1, work.most_tokens).mean() < work.mean_tokens
        low, high = (middle, high) if below else (low, middle)
    drawn = high * np.exp(work.spread * random.standard_normal(count))
    return np.clip(np.rint(drawn), 1, work.most_tokens).astype(np.int64)


def decoding_steps(tokens: Sequence[int], slots: int, waves: bool) -> int:
    """Returns how often an engine decodes until completions of these lengths are there."""
    if waves:
        return sum(max(tokens[start : start + slots]) for start in range(0, len(tokens), slots))
    free = [0] * slots  # a heap
    for count in tokens:
        heapreplace(free, free[0] + count)
    return max(free)


def sampling(work: Work, rates: Rates, tokens: Sequence[int]) -> float:
    """Returns the seconds until the last engine has sampled its part."""
    parts = [tokens[engine :: work.engines] for engine in range(min(work.engines, len(tokens)))]
    return max(
        rates.decode_step * decoding_steps(part, work.slots, work.waves) + rates.decode_token * sum(part) for part in parts
    )


def training(work: Work, rates: Rates, completion_tokens: float) -> float:
    own = work.trained(completion_tokens)
    batches = max(1, -(-int(own) // work.micro_batch_tokens))
    return work.updates * (batches * max(rates.train_token * own / batches, rates.micro_batch) + rates.update)


def simulate(work: Work, rates: Rates) -> dict[str, float]:
    """Returns the mean seconds of a step, by phase as in `metrics.jsonl` ("step", "generate", ...). The same on every call.

    The engine is asked for step s + `ahead` when the answers of step s are taken. Without `in_flight` a sync waits for all of
    them.
    """
    random, now, ready = np.random.default_rng(1), 0.0, list[float]()
    spent: list[dict[str, float]] = []

    def ask(until: int) -> None:
        while len(ready) < until:
            tokens = drawn_lengths(work, random, work.completions).tolist()
            of_step.append(sum(tokens))
            ready.append(max(now, ready[-1] if ready else 0.0) + sampling(work, rates, tokens))

    of_step: list[int] = []
    for step in range(STEPS):
        began = now
        ask(step + max(1, work.ahead))
        now = max(now, ready[step])
        ask(step + 1 + work.ahead)
        waited, scoring = now - began, rates.reward * work.completions
        learning = training(work, rates, of_step[step])
        now += scoring + learning
        if work.ahead and not work.in_flight:
            waited += max(0.0, ready[-1] - now)
            now = max(now, ready[-1])
        now += rates.sync + rates.rest
        phases = {"generate": waited, "reward": scoring, "train": learning, "sync": rates.sync, "save": rates.rest}
        spent.append({"step": now - began, **phases})
    return {name: sum(one[name] for one in spent[WARM:]) / (STEPS - WARM) for name in spent[0]}


def fit(one: NDArray[np.float64], other: NDArray[np.float64], seconds: NDArray[np.float64], share: float) -> tuple[float, float]:
    """Returns (a, b), both 0 or more, with a x one + b x other near the seconds of each step.

    Args:
        share: part of the time that the second product takes, unless the steps differ enough to tell.
    """
    columns = np.stack([one, other], axis=1)
    scale, weight = columns.mean(axis=0), np.sqrt(DOUBT * len(seconds))
    rows = np.concatenate([columns / scale, [[weight * share, weight * (share - 1)]]])
    a, b = np.linalg.lstsq(rows, np.append(seconds, 0.0), rcond=None)[0]
    whole = float(seconds.mean())
    a, b = (a, b) if min(a, b) >= 0 else (whole, 0.0) if b < 0 else (0.0, whole)
    return float(a / scale[0]), float(b / scale[1])
