"""Environments: what they answer and give, in which order, and what becomes of those that fail."""

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from conftest import read_jsonl
from helpers.recipes import problems, written
from helpers.waiting import HANGS, until
from tool_files import Scripted, answered, asked, worlds
from tool_templates import FAMILIES, tokenizer_of
from transformers import AutoTokenizer

from rlgen.analysis.pack import Chunk
from rlgen.analysis.rows import Query, find_rollouts, read_rows
from rlgen.cli.export import export_command
from rlgen.cli.files import unfilled_parameters
from rlgen.cli.replay import replay_command
from rlgen.cli.rollouts import block
from rlgen.cli.train import train_command
from rlgen.data.source import load_rows
from rlgen.data.suffix import Suffixes
from rlgen.errors import ToolError, UsageError
from rlgen.models.tiny import CHAT_TEMPLATE
from rlgen.recipe import load_recipe
from rlgen.recipe.data import DataRecipe
from rlgen.rewards.builtin import environment
from rlgen.rollout.conversations import Dialogue, turn_seed
from rlgen.rollout.environment import EnvironmentTurns, begin_of, first_of, observed
from rlgen.rollout.read import read_rollouts
from rlgen.rollout.sample import rollout, sample_seed
from rlgen.setup import data
from rlgen.tools.arena import EnvPool
from rlgen.types import Prompt, Sampling, ids_of, whole_conversation
from rlgen.worker_pool.failures import Failed

__all__ = ["worlds"]
pytestmark = pytest.mark.usefixtures("one_thread")
CODE = """
import asyncio, os, time


class Echo:
    def __init__(self, gives=0.25):
        self.gives, self.said = gives, []

    def reset(self, prompt, seed, begin="?"):
        self.begin = begin

    def step(self, message):
        self.said.append(message)
        if message == "raise":
            raise ValueError("no")
        if message == "sleep":
            time.sleep(3600)
        if message == "spin":
            while True:
                pass
        if message == "die":
            os._exit(3)
        if message == "odd":
            return "x", float("nan"), False
        if message.startswith("wait"):
            time.sleep(float(message[5:]))
        return f"{self.begin}{len(self.said)}:{message}", self.gives, message == "end"


class Later(Echo):
    async def step(self, message):
        await asyncio.sleep(0.01)
        return Echo.step(self, message)


class Told:
    def reset(self, prompt, answer):
        return f"{prompt} is {answer}, is it?"

    def step(self, message):
        return {"you said": message}, 1, True


class Changing:
    def reset(self, prompt):
        return f"{time.time_ns()}"

    def step(self, message):
        return "", 0.0, True


class Numpy:
    def reset(self, prompt):
        pass

    def step(self, message):
        import numpy

        return "", numpy.float32(0.5), numpy.bool_(len(message) < 3)


class Gymnasium(Told):
    def reset(self, prompt):
        return "You see a door.", {"seed": 3}


class Dated(Told):
    def reset(self, when):
        return f"{type(when).__name__} {when}"


class Nothing:
    def reset(self, prompt):
        pass
"""


@pytest.fixture
def arenas(worlds: Callable[..., EnvPool], tmp_path: Path) -> Callable[..., EnvPool]:
    """Opens environments of CODE."""
    file = tmp_path / "world.py"
    file.write_text(CODE)
    return lambda name="Echo", **settings: worlds(f"{file}:{name}", **settings)


def begin(arena: EnvPool, message: str, **columns: Any) -> "tuple[int, Future[Any]]":
    """Begins a conversation: its number, and what the answer will be."""
    talk = arena.number()
    return talk, asked(arena.begin, talk, {"prompt": "p", "seed": 1, **columns}, None, message)


def begun(arena: EnvPool, message: str) -> Any:
    return begin(arena, message)[1].result(HANGS)


def answer(text: str, reward: float, done: bool = False) -> dict[str, Any]:
    return {"text": text, "characters": len(text), "reward": reward, "done": done}


@pytest.mark.parametrize("name", ["Echo", "Later"])
def test_each_conversation_has_a_state_of_its_own(arenas: Callable[..., EnvPool], name: str) -> None:
    arena = arenas(name, args={"gives": 0.5})
    (one, first), (other, second) = begin(arena, "a", begin="#"), begin(arena, "b")
    assert first.result(HANGS) == answer("#1:a", 0.5) and second.result(HANGS) == answer("?1:b", 0.5)
    assert answered(arena.step, one, "c") == answer("#2:c", 0.5)
    assert answered(arena.step, one, "end") == answer("#3:end", 0.5, done=True)
    assert "held the state of this conversation" in answered(arena.step, one, "d").message, "it is over"
    assert answered(arena.step, other, "e") == answer("?2:e", 0.5)


def test_a_slow_one_holds_up_only_its_own_conversation(arenas: Callable[..., EnvPool]) -> None:
    arena, came = arenas(), []
    began = time.monotonic()
    asked = [begin(arena, f"wait {seconds}")[1] for seconds in (0.8, *[0.3] * 7)]
    for one in (*asked[1:], asked[0]):
        one.result(HANGS)
        came.append(time.monotonic() - began)
    assert came[6] < came[7] and came[7] < 0.3 * 7, "they waited at the same time"


@pytest.mark.parametrize("how", ["sleep", "spin"])
def test_one_that_hangs_ends_its_conversation_and_no_other(arenas: Callable[..., EnvPool], how: str) -> None:
    arena = arenas(timeout=0.5)
    other, came = begin(arena, "a")
    assert came.result(HANGS) == answer("?1:a", 0.25)
    failed = begun(arena, how)
    assert isinstance(failed, Failed) and failed.cause == "timeout"
    assert answered(arena.step, other, "b") == answer("?2:b", 0.25)
    # Once no conversation is left, the process in which it still hangs makes room for another one.
    (pool,) = arena.calls.pools
    arena.end(other)
    until(pool._workers[0].ended)
    assert begun(arena, "c") == answer("?1:c", 0.25)
    assert (pool.lost, pool.killed) == (1, 0)


def test_what_fails_says_why(arenas: Callable[..., EnvPool]) -> None:
    arena = arenas()
    other, came = begin(arena, "a")
    came.result(HANGS)
    failed = begun(arena, "raise")
    assert failed.cause == "error" and failed.message.startswith("ValueError: no (") and "world.py:15" in failed.message
    assert "step returned the reward nan; a reward is a finite number" in begun(arena, "odd").message
    assert begun(arena, "die").cause == "died"
    assert "the process that held the state of this conversation has ended" in answered(arena.step, other, "b").message


def test_numbers_of_numpy_are_numbers(arenas: Callable[..., EnvPool]) -> None:
    assert begun(arenas("Numpy"), "ab") == answer("", 0.5, True) and begun(arenas("Numpy"), "abc") == answer("", 0.5, False)


def test_what_reset_returns_beside_the_observation_is_refused(arenas: Callable[..., EnvPool]) -> None:
    failed = answered(arenas("Gymnasium").first, {"prompt": "p"})
    assert "reset returned ('You see a door.', {'seed': 3}); return the observation alone" in failed.message


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("Nothing", {}, "not a class with a method `step`"),
        ("Nowhere", {}, "has no function"),
        ("Echo", {"give": 1}, "no parameter `give`"),
    ],
)
def test_what_is_no_environment_is_refused(arenas: Callable[..., EnvPool], name: str, args: dict[str, Any], text: str) -> None:
    with pytest.raises(ToolError, match=text):
        arenas(name, args=args)


def test_the_first_observation_stands_in_the_prompt(arenas: Callable[..., EnvPool], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file.write_text("".join(json.dumps({"q": q, "answer": a}) + "\n" for q, a in (("1+1", 2), (chat, 3))))
    read = load_rows(DataRecipe(source=str(file), columns={"prompt": "q"}), 0)
    rows = observed(read, "q", arenas("Told"))
    assert [row["q"] for row in rows.rows] == ["1+1 is 2, is it?", [chat[0], {"role": "user", "content": f"{chat} is 3, is it?"}]]
    assert [row["before_reset"] for row in rows.rows] == ["1+1", chat]
    assert len({row["seed"] for row in rows.rows}) == 2 and rows.fingerprint != read.fingerprint
    plain = observed(read, "q", arenas())
    assert [row["q"] for row in plain.rows] == ["1+1", chat] and plain.columns == ("q", "answer", "seed")


def test_a_row_may_have_no_prompt_before_the_first_observation(arenas: Callable[..., EnvPool], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"q": q, "answer": 2}) + "\n" for q in (None, "", [], ["no message"])))
    arena = arenas("Told")
    rows = observed(load_rows(DataRecipe(source=str(file), columns={"prompt": "q"}), 0), "q", arena)
    assert [row["q"] for row in rows.rows] == [" is 2, is it?", " is 2, is it?", [], ["no message"]]
    first = begin_of(rows.rows[0], "q"), first_of(rows.rows[0], "q"), "hello"
    assert answered(arena.begin, 0, *first)["reward"] == 1.0  # it begins alike


def test_reset_gets_the_same_values_each_time(arenas: Callable[..., EnvPool], tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["p"], "when": [date(2024, 1, 2)]}), tmp_path / "rows.parquet")
    arena = arenas("Dated")
    rows = observed(load_rows(DataRecipe(source=str(tmp_path / "rows.parquet")), 0), "prompt", arena)
    (row,) = rows.at([0])
    assert row["prompt"] == "str 2024-01-02"
    assert answered(arena.begin, 0, begin_of(row, "prompt"), first_of(row, "prompt"), "hello")["reward"] == 1.0


def test_what_begins_otherwise_each_time_is_refused(arenas: Callable[..., EnvPool]) -> None:
    failed = answered(arenas("Changing").begin, 0, {"prompt": "p", "seed": 1}, "1", "hello")
    assert "completions of one prompt must begin alike; derive all randomness from `seed`" in failed.message


def talked(arena: EnvPool, said: list[str], max_turns: int = 8, tokens: int = 4000, **settings: Any) -> tuple[Any, Any, Any]:
    """A conversation in which the model says what is given: the sample, its messages, and the tokenizer."""
    tokenizer = tokenizer_of(FAMILIES["qwen2.5"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    turns = EnvironmentTurns(arena, Suffixes(tokenizer, DataRecipe(source="x"), (), [end], **settings), "prompt")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "go"}], tokenize=False, add_generation_prompt=True)
    prompt = Prompt(
        position=0, row=0, text=text, prompt_ids=ids_of(tokenizer(text).input_ids), columns={"prompt": "go", "seed": 1}
    )
    script = {
        turn_seed(sample_seed(7, 0, 0), turn): [*tokenizer(one, add_special_tokens=False).input_ids, end]
        for turn, one in enumerate(said)
    }
    sampling = Sampling(max_tokens=tokens, temperature=1.0, stop_ids=(end,))
    dialogue = Dialogue(turns=turns, max_turns=max_turns, reply_timeout=HANGS)
    (group,) = rollout(Scripted(script), [prompt], sampling, 1, 7, 0, tokenizer, dialogue)  # type: ignore[arg-type]
    (sample,) = group.samples
    return sample, whole_conversation(sample.messages, sample.completion), tokenizer


def test_ids_are_those_of_the_template_and_masks_those_of_the_model(arenas: Callable[..., EnvPool]) -> None:
    for role in ("user", "tool"):
        said = ["a", "<|im_start|>", "end"]
        sample, messages, tokenizer = talked(arenas(role=role), said, role=role)
        assert messages == [
            {"role": "assistant", "content": "a"},
            {"role": role, "content": "?1:a", "reward": 0.25},
            {"role": "assistant", "content": ""},  # the name of a special token is none of what the model says
            {"role": role, "content": "?2:", "reward": 0.25},
            {"role": "assistant", "content": "end"},
            {"role": "environment", "content": "?3:end", "reward": 0.25},
        ]
        assert environment(messages) == 0.75 and sample.counts == {"steps": 3} and sample.finish_reason == "stop"
        spoken = [{**one, "content": text} for one, text in zip(messages[::2], said, strict=True)]
        talk = [{"role": "user", "content": "go"}, spoken[0], messages[1], spoken[1], messages[3], spoken[2]]
        whole = tokenizer(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False).input_ids
        row = np.concatenate([sample.prompt_ids, sample.completion_ids]).tolist()
        assert row == whole[: len(row)] and set(whole[len(row) :]) <= set(tokenizer("\n").input_ids)
        ends = [*tokenizer("<|im_end|>").input_ids]
        sampled = [[*tokenizer(one, add_special_tokens=False).input_ids, *ends] for one in said]
        spans = [sample.completion_ids[span.start : span.stop].tolist() for span in sample.spans]
        assert spans == sampled and sample.loss_mask.sum() == sum(map(len, sampled))
        assert np.array_equal(np.isnan(sample.sampler_logp), ~sample.loss_mask)


def test_the_last_turn_is_judged_too(arenas: Callable[..., EnvPool]) -> None:
    sample, messages, _ = talked(arenas(), ["a", "b"], max_turns=2)
    assert sample.finish_reason == "length" and sample.counts == {"steps": 2, "unanswered": 1}
    assert messages[-2:] == [{"role": "assistant", "content": "b"}, {"role": "environment", "content": "?2:b", "reward": 0.25}]
    assert environment(messages) == 0.5
    sample, messages, _ = talked(arenas(), ["a", "end"], max_turns=2)
    assert sample.finish_reason == "stop" and environment(messages) == 0.5


def test_a_long_observation_is_cut(arenas: Callable[..., EnvPool]) -> None:
    sample, messages, _ = talked(arenas(max_output_tokens=40), ["x" * 100, "end"])
    assert sample.counts == {"steps": 2, "cut": 1}
    assert messages[1]["content"].startswith("?1:xxx") and messages[1]["content"].endswith("more characters]")


def test_a_failed_conversation_has_no_reward(arenas: Callable[..., EnvPool]) -> None:
    sample, messages, _ = talked(arenas(), ["a", "raise"])
    assert sample.counts == {"steps": 2, "raised": 1} and messages[-2] == {"role": "assistant", "content": "raise"}
    with pytest.raises(RuntimeError, match="error: ValueError: no"):
        environment(messages)


RECIPE = """\
run: {name: worlds, steps: 3, seed: 3}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: "task:arithmetic", options: {digits: 1}, chat: true, chat_template: chat.jinja}
rewards: [{use: environment}, {use: length, args: {target: 6}, weight: 0.1}]
environment: {use: "world.py:Length", args: {most: 40}}
rollout: {prompts_per_step: 2, group_size: 4, max_completion_tokens: 110, max_turns: 3}
engine: {kind: transformers}
optim: {learning_rate: 1.0e-3}
checkpoint: {every: 1, keep: 9}
"""
TEMPLATE = "{# mine #}" + CHAT_TEMPLATE
LENGTH = """\
class Length:
    def __init__(self, most):
        self.most, self.said = most, 0

    def reset(self, prompt, seed):
        return f"{prompt} ({seed % 10})"

    def step(self, message):
        self.said += 1
        return f"turn {self.said}", len(message) / self.most, len(message) % 3 == 0
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    (tmp_path / "world.py").write_text(LENGTH)
    monkeypatch.setattr(data, "stop_ids", lambda *given: (*range(180, 258), 259))  # so that turns end
    return written(tmp_path, RECIPE)


def test_a_run_is_rewarded_by_its_environment(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_command(recipe, [], False, False, 2, run)
    record = read_jsonl(run / "metrics.jsonl")[1]
    rows = read_rollouts(run, 2).to_pylist()
    given = []
    for row in rows:
        messages = json.loads(row["messages"])
        said = [one["content"] for one in messages if one["role"] == "assistant"]
        judged = [one for one in messages if "reward" in one]
        assert [one["reward"] for one in judged] == [len(text) / 40 for text in said[: len(judged)]]
        assert len(said) == len(judged) or row["finish_reason"] == "length"
        assert (messages[-1]["role"] == "environment") == (len(said) == len(judged))
        assert row["completion"] == said[-1] and row["prompt"].count(f"({row['data_seed'] % 10})") == 1
        assert row["rewards"]["environment"] == pytest.approx(sum(one["reward"] for one in judged))
        given.append(row["rewards"]["environment"])
    assert record["reward/environment/mean"] == pytest.approx(np.mean(given)) and np.std(given) > 0
    assert record["tools/steps"] == sum(dict(row["tool_counts"]).get("steps", 0) for row in rows) > 8
    assert record["turns/max"] == 3 and record["sampler/delta_max"] < 1e-4


def test_the_parameters_of_its_rewards_are_known(recipe: Path) -> None:
    (recipe.parent / "r.py").write_text("def f(messages, seed, answer): pass\ndef g(message): pass\n")
    given = "rewards=[{use: environment}, {use: 'r.py:f'}, {use: 'r.py:g'}]"
    (problem,) = unfilled_parameters(load_recipe(recipe, [given]), {"prompt", "answer"})
    assert "r.py:g needs `message`" in problem.what


@pytest.mark.slow
def test_a_run_is_resumed_replayed_and_exported(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, world = tmp_path / "run", tmp_path / "world.py"
    train_command(recipe, [], False, False, 2, run)
    world.write_text(LENGTH.replace("% 3", "% 4"))
    with pytest.raises(UsageError, match=r"the file of environment Length .* was edited since the last attempt"):
        train_command(recipe, [], True, False, None, run)
    world.write_text(LENGTH)
    train_command(recipe, [], True, False, None, run)
    records = read_jsonl(run / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    capsys.readouterr()
    replay_command(run, 3, [], True)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["differences"] == {} and found["metrics"]["loss"] == records[2]["loss"]
    rows = read_rollouts(run, 3).to_pylist()
    chunk = Chunk.of(SimpleNamespace(recipe=load_recipe(recipe, []).recipe), read_rollouts(run, 3))  # type: ignore[arg-type]
    said = [[(one["role"], one["content"]) for one in json.loads(row["messages"])] for row in rows]
    assert [[(one["role"], one["text"]) for one in talk] for talk in chunk.texts["messages"]] == said
    mask = np.concatenate([row["loss_mask"] for row in rows])
    assert np.array_equal((chunk.flags & 1) == 1, mask) and np.array_equal(np.isnan(chunk.sampler), ~mask)
    every = read_rows(run, find_rollouts(run, Query()), slice(0, 100))
    done = next(row for row in every if len(row["messages"]) > 2 and row["messages"][-1]["role"] == "environment")
    shown = [line.strip() for line in block(done, full=True).plain.splitlines()]
    named = [line.split("  ")[0] for line in shown if re.match(r"\d+: ", line)]
    last = len(done["messages"])
    between = [name for turn in range(1, last - 1, 2) for name in (f"{turn}: assistant", f"{turn + 1}: user, not trained on")]
    assert named == [*between, f"{last}: environment, not trained on"], "the last turn is the completion below"
    export_command(run, tmp_path / "out", "2", "float32", as_json=True)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("environment=null", "the reward environment adds up the rewards of an environment, but there is none"),
        ("rewards=[{use: length, args: {target: 6}}]", "environment: its rewards and failures would be ignored"),
        ("tools=[{use: 'world.py:f'}]", "environment and tools both answer the turns of the model"),
        ("data.chat=false", "the prompts of a task are texts; set data.chat to true"),
        ("environment.use=guess_numbr", "did you mean `guess_number`?"),
        ("environment.use=world", "is not a built-in environment, file.py:function or pkg.mod:function"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, change: str, text: str) -> None:
    assert text in "\n".join(problems(written(tmp_path, RECIPE), change))
