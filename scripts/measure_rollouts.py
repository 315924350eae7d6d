"""What a step's rollouts and journal cost a token, on disk and in CPU time: for `make scale`, or alone.

python scripts/measure_rollouts.py [TOKENS]
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlgen.engines.base import EngineInfo, Settings
from rlgen.processes import Processes
from rlgen.rollout.journal import Journal
from rlgen.rollout.parquet import Rollout
from rlgen.rollout.read import read_rollouts
from rlgen.rollout.samples import Ragged, Samples
from rlgen.run.rollouts import RolloutWriter
from rlgen.types import Completion, Prompt, Request, Sampling, ids_of

VOCABULARY, ROW, GROUP = 150_000, 2000, 16
LOGITS = 128  # of which one is sampled; enough for log-probs that look like those of a model
SAMPLING = Sampling(max_tokens=ROW, temperature=1.0, stop_ids=(VOCABULARY - 1,))
SETTINGS = Settings(dtype="bfloat16", head_dtype="float32", logprobs_mode="processed_logprobs", vocab_size=VOCABULARY)
FACTS = EngineInfo(
    engine="e 1", model="m", revision=None, settings=SETTINGS, stop_ids=(), max_model_len=None, cache_block=None, plan="p"
)


class Words:
    """A tokenizer of the fastest kind: an id is a word, of four characters on average."""

    def __init__(self, rng: np.random.Generator) -> None:
        letters = np.array(list("etaoinshrdlucmfw"))
        self.words = np.array(
            [" " + "".join(rng.choice(letters, size=size)) for size in rng.integers(2, 5, VOCABULARY)], dtype=object
        )

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return ["".join(self.words[row]) for row in rows]


class Prompts:
    """Prompts of 200 characters with an answer."""

    def at(self, position: int) -> Prompt:
        return Prompt(
            position=position,
            row=position,
            text=f"question {position} " * 12,
            prompt_ids=ids_of(range(50)),
            columns={"question": f"question {position} " * 12, "answer": str(position)},
        )


def log_probs(tokens: int, noise: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Log-probs of sampled tokens as float32 log_softmax of logits of about 20 makes them, and with noise on the logits."""
    made = torch.Generator().manual_seed(0)
    sampler, policy = [], []
    for start in range(0, tokens, 4096):
        count = min(4096, tokens - start)
        logits = torch.randn(count, LOGITS, generator=made) * 3 + 6
        # Most tokens of a trained model are nearly certain: log-probs of -0.2 on average.
        logits[torch.arange(count), torch.randint(LOGITS, (count,), generator=made)] += 9 + torch.rand(count, generator=made) * 22
        logp = torch.log_softmax(logits, -1)
        ids = torch.multinomial(logp.exp(), 1, generator=made)
        sampler.append(logp.gather(1, ids)[:, 0])
        other = torch.log_softmax(logits + torch.randn(count, LOGITS, generator=made) * noise, -1)
        policy.append(other.gather(1, ids)[:, 0])
    return torch.cat(sampler).numpy(), torch.cat(policy).numpy()


def made(tokens: int, noise: float) -> Rollout:
    """A step of rows of `ROW` tokens whose ids follow Zipf's law."""
    rng, rows = np.random.default_rng(0), tokens // ROW
    shares = 1 / np.arange(1, VOCABULARY + 1)
    ids = rng.choice(VOCABULARY, size=rows * ROW, p=shares / shares.sum()).astype(np.int32)
    sampler, policy = log_probs(rows * ROW, noise)
    offsets = np.arange(0, rows * ROW + 1, ROW)
    numbers = np.arange(rows)
    samples = Samples(
        labels=("exact_match", "length"),
        group_id=numbers // GROUP,
        sample_index=numbers % GROUP,
        prompt_ids=Ragged(np.tile(np.arange(50, dtype=np.int32), rows), np.arange(0, 50 * rows + 1, 50)),
        completion_ids=Ragged(ids, offsets),
        sampler_logp=Ragged(sampler, offsets),
        spans=Ragged(np.tile([0, ROW, 3], (rows, 1)), np.arange(rows + 1)),
        truncated=np.zeros(rows, dtype=bool),
        seed=rng.integers(0, 2**62, rows),
        cached_tokens=np.zeros(rows, dtype=np.int64),
        rewards=rng.random((rows, 2)),
        reward=rng.random(rows),
        reward_errors=({},) * rows,
    )
    return Rollout(
        step=4,
        samples=samples,
        policy_logp=Ragged(policy, offsets),
        advantage=rng.normal(size=rows),
        trained=np.ones(rows, dtype=bool),
    )


def seconds(work: Callable[[], Any]) -> float:
    """CPU time of this process in all its threads: what others do on the machine does not count."""
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(tokens: int, folder: Path, noise: float = 1e-6) -> dict[str, float]:
    """Bytes and nanoseconds a token: of rollouts written and read, of the text in them, and of the journal written and read."""
    folder.mkdir(exist_ok=True)
    rollout = made(tokens, noise)
    count = int(rollout.samples.completion_ids.offsets[-1])
    words = Words(np.random.default_rng(1))
    rows = [row.tolist() for row in rollout.samples.completion_ids]
    decode = seconds(lambda: words.batch_decode(rows, True))
    journal = Journal.open(folder / "journal", 0, Processes.alone(), FACTS, [], print)
    journal.starts_from(3, "w3")
    writer = RolloutWriter(
        folder=folder / "rollouts",
        rank=0,
        world=1,
        prompt_at=Prompts().at,
        tokenizer=words,  # type: ignore[arg-type]
        stop_ids=SAMPLING.stop_ids,
        stamp=lambda rollout: journal.stamp(rollout, SAMPLING),
    )
    loop = seconds(lambda: writer.write(rollout))
    wrote = loop + seconds(writer.wait)
    writer.close()
    size = (folder / "rollouts" / "step_000004.parquet").stat().st_size
    read = seconds(lambda: read_rollouts(folder, 4))

    def answer() -> None:
        for sample in rollout.samples:
            journal.answered(4, sample, SAMPLING)

    journaled = seconds(answer)
    again = Journal.open(folder / "journal", 0, Processes.alone(), FACTS, [], print)
    again.starts_from(3, "w3")
    places = list(zip(rollout.samples.group_id.tolist(), rollout.samples.sample_index.tolist(), strict=True))
    asked = [Request(prompt_ids=s.prompt_ids, seed=s.seed) for s in rollout.samples]
    found: dict[int, Completion] = {}
    replayed = seconds(lambda: found.update(again.found(4, places, asked, SAMPLING, 0)))
    assert len(found) == len(places), "the journal has them all"
    a_token = 1e9 / count
    return {
        "rollouts, bytes a token": size / count,
        "rollouts, ns a token": (wrote - decode) * a_token,
        "rollouts, ns a token of the loop": loop * a_token,
        "text, ns a token": decode * a_token,
        "rollouts read, ns a token": read * a_token,
        "journal, ns a token": journaled * a_token,
        "journal read, ns a token": replayed * a_token,
    }


def main() -> int:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000
    for noise in (1e-6, 1e-2):
        with tempfile.TemporaryDirectory() as folder:
            measured = measure(tokens, Path(folder), noise)
        print(json.dumps({"noise": noise, **{name: round(value, 2) for name, value in measured.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
