"""Runs whose completions are conversations: trained by every algorithm, killed and resumed, by two processes, and looked at."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import read_jsonl
from helpers.recipes import written
from helpers.scripted import Scripted, dialogue, in_threads
from helpers.torchrun import ALONE, torchrun
from kills import ENGINES, KILLS, ROOT, Kill, Kills
from rollout.talking import STOPS

from rlgen.analysis.pack import Chunk
from rlgen.analysis.rows import Query, find_rollouts, read_rows
from rlgen.cli.rollouts import block
from rlgen.cli.train import train_command
from rlgen.recipe import load_recipe
from rlgen.rollout.parquet import parts_of, read_part
from rlgen.rollout.read import from_rollouts, read_rollouts
from rlgen.setup import data, trainer
from rlgen.types import turns_of

pytestmark = pytest.mark.usefixtures("one_thread")

TALKING = ROOT / "tests" / "rollout" / "talking.py"
RECIPE = """\
run: {name: talks, steps: 6, seed: 3}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64}
rewards: [{use: "rewards.py:said"}]
rollout: {prompts_per_step: 4, group_size: 4, max_completion_tokens: 32}
optim: {learning_rate: 1.0e-3, warmup_steps: 2, schedule: cosine}
checkpoint: {every: 2, keep: 2}
"""
REWARD = """\
def said(messages, completion):
    assert messages[-1] == {"role": "assistant", "content": completion}
    assert [one["role"] for one in messages[:-1]] == ["assistant", "tool"] * (len(messages) // 2)
    return 0.1 * len(messages) + sum(int(one["content"]) for one in messages[1::2]) + 0.01 * len(completion)
"""
WORLD = RECIPE.replace(
    'rewards: [{use: "rewards.py:said"}]', 'rewards: [{use: environment}]\nenvironment: {use: "world.py:Counts"}'
).replace("max_completion_tokens: 32", "max_completion_tokens: 90, max_turns: 3")
COUNTS = """\
class Counts:
    def reset(self, prompt, seed):
        self.said, self.seed = "", seed % 100
        return f"{prompt} ({self.seed})"

    def step(self, message):
        self.said += message
        return f"{len(self.said)}", sum(map(ord, message)) % 7 / 7 + len(self.said) / 100, len(message) % 4 == 0
"""
# Journals hold whole conversations, so the fifth answer is the end of a fifth conversation.
ANSWERED = "after:rlgen.rollout.journal:Journal.answered:5@4"


class Talks(Kills):
    """Runs with scripted conversations, killed and resumed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.recipe.write_text(RECIPE)
        (folder / "rewards.py").write_text(REWARD)

    def command(self, engine: str, run: Path, *, instant: str | None = None, resume: bool = False) -> list[str]:
        settings = [word for setting in ENGINES[engine] for word in ("--set", setting)]
        program = [sys.executable, str(TALKING), instant or "none", "train", str(self.recipe)]
        return [*program, "--run-dir", str(run), *settings, *(["--resume"] if resume else [])]


class Worlds(Talks):
    """Runs whose conversations an environment leads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.recipe.write_text(WORLD)
        (folder / "world.py").write_text(COUNTS)

    def command(self, engine: str, run: Path, *, instant: str | None = None, resume: bool = False) -> list[str]:
        command = super().command(engine, run, instant=instant, resume=resume)
        return [*command[:2], f"own/{command[2]}", *command[3:]]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("worlds"))


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Talks:
    return Talks(tmp_path_factory.mktemp("talks"))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    """What replies in runs of this process."""
    led = dialogue(times=2, max_turns=3, later=in_threads)
    opened = trainer.open_scorer
    monkeypatch.setattr(trainer, "open_scorer", lambda *given: opened(*given[:6], turns=True))
    monkeypatch.setattr(data, "stop_ids", lambda *given: STOPS)
    monkeypatch.setattr(trainer, "open_dialogue", lambda *given: led)
    assert isinstance(led.turns, Scripted)
    yield led.turns


def test_a_run_writes_and_shows_its_conversations(scripted: Scripted, tmp_path: Path) -> None:
    recipe, run = written(tmp_path, RECIPE), tmp_path / "run"
    (tmp_path / "rewards.py").write_text(REWARD)
    train_command(recipe, ["engine={kind: transformers}", "run.steps=2", "optim.warmup_steps=0"], False, False, None, run)
    assert scripted.closed
    record = read_jsonl(run / "metrics.jsonl")[1]
    rows = read_rollouts(run, 2).to_pylist()
    turns = [len(turns_of([tuple(span.values()) for span in row["spans"]])) for row in rows]  # type: ignore[misc]
    sampled = [sum(row["loss_mask"]) for row in rows]
    between = [len(row["completion_ids"]) - count for row, count in zip(rows, sampled, strict=True)]
    assert record["turns/mean"] == np.mean(turns) > 2 and record["turns/max"] == max(turns)
    assert record["turns/reply_tokens"] == np.mean(between) > 3
    assert record["completions/mean_tokens"] == np.mean(sampled) and record["tokens/generated"] == sum(sampled)
    assert record["tools/calls"] == sum(dict(row["tool_counts"])["calls"] for row in rows) == sum(turns) - len(turns)
    assert record["sampler/delta_max"] < 1e-4 and record["tokens/trained"] <= sum(sampled)
    for row, count in zip(rows, turns, strict=True):
        messages = json.loads(row["messages"])
        assert len(messages) == 2 * count - 1 and messages[-1] == {"role": "assistant", "content": row["completion"]}
        mask = np.array(row["loss_mask"])
        assert np.array_equal(np.isnan(row["sampler_logp"]), ~mask)
        assert (np.array(row["policy_logp"] or np.zeros(len(mask)))[~mask] == 0).all()
    # the journal of a resumed run reads the same columns, without the last message
    (part,) = parts_of(run / "rollouts" / "step_000002.parquet")
    found = read_part(part)
    assert found is not None
    assert [json.loads(one) for one in found[0].messages] == [json.loads(row["messages"])[:-1] for row in rows]
    assert from_rollouts(run, 2).counts == tuple(dict(row["tool_counts"]) for row in rows)  # type: ignore[union-attr]
    query = Query(text="turn 1 of 2")  # of a message that is not the last one
    shown = read_rows(run, find_rollouts(run, query), slice(0, 100))
    assert {row["sample_index"] for row in shown} == {2} and shown[0]["messages"][2]["content"] == "turn 1 of 2"
    assert "4: tool, not trained on" in block(shown[0], full=True).plain and "messages" not in block(shown[0], full=True).plain
    chunk = Chunk.of(SimpleNamespace(recipe=load_recipe(recipe, []).recipe), read_rollouts(run, 2))  # type: ignore[arg-type]
    texts = [[(one["role"], one["text"]) for one in row] for row in chunk.texts["messages"]]
    assert texts == [[(one["role"], one["content"]) for one in json.loads(row["messages"])] for row in rows]
    assert all("messages" not in prompt["data"] for prompt in chunk.texts["prompts"])
    assert (chunk.flags & 1).sum() == sum(sampled) and np.array_equal(np.isnan(chunk.sampler), (chunk.flags & 1) == 0)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", "preferences", "reference"])  # grpo, online_dpo, rloo
def test_killed_and_resumed_is_undisturbed(talks: Talks, engine: str) -> None:
    outcome = talks(Kill(engine, "among conversations", ANSWERED), f"killed_{engine}")
    assert outcome.problem is None, outcome
    assert read_jsonl(talks.folder / engine / "metrics.jsonl")[-1]["turns/mean"] > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "between completions",
        "in half a record of the journal",
        "before any reward",
        "after all rewards",
        "inside of backward",
        "after the optimizer",
        "in mid-sync",
        "in half a line of metrics",
        "at 40 % of a save",
        "before a step's rollouts are there",
    ],
)
def test_an_environment_is_killed_at_ten_instants(worlds: Worlds, words: str) -> None:
    """Ids, log-probs, masks, spans and messages of the resumed run are those of the undisturbed one, to the last bit."""
    kill = next(kill for kill in KILLS if kill.words == words)
    outcome = worlds(Kill("transformers", words, kill.instant), f"killed_{''.join(filter(str.isalnum, words))}")
    assert outcome.problem is None, outcome
    record = read_jsonl(worlds.folder / "transformers" / "metrics.jsonl")[-1]
    assert record["turns/mean"] > 1.5 and record["reward/environment/std"] > 0


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("engine", "instant"),
    [
        ("colocated", "half:rlgen.engines.colocated:ColocatedEngine._run:1@3"),
        ("server", ANSWERED),
        ("ahead", "after:rlgen.rollout.journal:Journal.answered:3@4"),
    ],
)
def test_killed_and_resumed_with_the_real_vllm(talks: Talks, engine: str, instant: str) -> None:
    outcome = talks(Kill(engine, "among conversations", instant), f"killed_{engine}")
    assert outcome.problem is None, outcome
    record = read_jsonl(talks.folder / engine / "metrics.jsonl")[-1]
    assert record["turns/mean"] > 2 and record["rollout/staleness_max"] == (1 if engine == "ahead" else 0)
    assert record["sampler/delta_max"] < 1e-4 or engine == "ahead"


@pytest.mark.slow
@pytest.mark.vllm
def test_killed_while_weights_change_under_conversations(talks: Talks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps ahead, with replies that take up to half a second: what the killed run had, the resumed one has."""
    monkeypatch.setenv("REPLY_SECONDS", "0.5")
    outcome = talks(Kill("flight", "among conversations", ANSWERED), "killed_flight")
    assert outcome.problem is None, outcome
    run = talks.folder / "killed_flight"
    records = read_jsonl(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 11)) and records[-1]["turns/mean"] > 2
    assert max(record["rollout/staleness_max"] for record in records) <= 4
    assert sum(record["rollout/dropped_stale"] for record in records) == 0
    rows = [row for step in range(1, 11) for row in read_rollouts(run, step).to_pylist()]
    assert any(len({span["version"] for span in row["spans"]}) > 1 for row in rows), "of several versions"
    for row in rows:
        mask, covered = np.array(row["loss_mask"]), np.zeros(len(row["completion_ids"]), dtype=bool)
        for span in row["spans"]:
            covered[span["start"] : span["stop"]] = True
        assert np.array_equal(mask, covered) and np.array_equal(np.isnan(row["sampler_logp"]), ~mask)
    assert talks.start([sys.executable, "-m", "rlgen", "report", str(run)]).returncode == 0


@pytest.mark.slow
@pytest.mark.vllm
def test_two_processes_sample_the_same_conversations(talks: Talks) -> None:
    found, metrics = [], []
    for name, program in {"one": ALONE, "two": torchrun()}.items():
        ended = talks.start([*program, *talks.command("colocated", talks.folder / name)[1:], "--max-steps", "3"])
        assert ended.returncode == 0, ended.stderr[-3000:]
        found.append(from_rollouts(talks.folder / name, 1))
        metrics.append(read_jsonl(talks.folder / name / "metrics.jsonl")[0])
    assert found[0] is not None and found[0] == found[1] and max(found[0].turns) == 3
    alone, shared = ({key: of[key] for key in of if key.startswith(("turns/", "tools/"))} for of in metrics)
    assert alone == shared and alone["tools/calls"] > 16
