"""Rollouts of the user: what they return is proved to be what the engine sampled, id for id and bit for bit."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RECIPE, ROOT, read_jsonl, tiny_model
from helpers.recipes import problems
from helpers.rollouts import rollout_writer

from rlgen.cli.replay import replay_command
from rlgen.cli.train import train_command
from rlgen.engines.transformers import TransformersEngine
from rlgen.errors import EngineError, Fault, SentinelError, ToolError
from rlgen.models.tiny import byte_tokenizer
from rlgen.rollout.answers import check_answers
from rlgen.rollout.custom import Answer, Ask, CustomRollout, Function, Handle, Rolled
from rlgen.rollout.read import read_rollouts
from rlgen.rollout.sample import build_groups, requests_for
from rlgen.rollout.samples import Samples
from rlgen.types import Completion, Prompt, Sampling, Span, ids_of

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = 3
SAMPLING = Sampling(max_tokens=24, temperature=1.0, stop_ids=(*range(250, 258), 259))
PROMPTS = [
    Prompt(position=5 + at, row=at, text="", prompt_ids=ids_of(range(10 + at, 20 + 2 * at)), columns={"answer": at})
    for at in range(2)
]
PLACES = [(prompt, sample) for prompt in range(2) for sample in range(SIZE)]


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    return TransformersEngine(model=tiny_model("qwen3"), fp32_head=True, max_num_seqs=8)


def sampled(engine: TransformersEngine, function: Function) -> list[Completion]:
    told: dict[int, Completion] = {}
    custom = CustomRollout(use="mine.py:f", function=function, sha256=None)
    requests = requests_for(PROMPTS, SIZE, 3)
    found = custom(engine, PROMPTS, requests, SAMPLING, byte_tokenizer(), 0, told.__setitem__)
    assert told == dict(enumerate(found))
    check_answers(requests, found, SAMPLING, 0, free=True)
    return found


def each(handle: Handle, **ask: Any) -> list[Answer]:
    return handle.generate([Ask(*place, **ask) for place in PLACES])


def as_it_came(prompts: Sequence[Prompt], handle: Handle) -> list[Rolled]:
    return [Rolled(*place, one.ids, one.logp) for place, one in zip(PLACES, each(handle), strict=True)]


def test_one_that_asks_once_samples_as_ever(engine: TransformersEngine) -> None:
    usual = engine.generate(requests_for(PROMPTS, SIZE, 3), SAMPLING)
    assert sampled(engine, as_it_came) == usual and {one.finish_reason for one in usual} == {"stop", "length"}
    # in another order, and with what was asked in vain
    assert sampled(engine, lambda prompts, handle: [*reversed(as_it_came(prompts, handle))]) == usual


def test_what_was_not_sampled_is_masked(engine: TransformersEngine) -> None:
    """A start that is given, a turn that is cut off, a word in between, and the answer after it."""
    kept: dict[tuple[int, int], tuple[Answer, Answer]] = {}

    def forced(prompts: Sequence[Prompt], handle: Handle) -> list[Rolled]:
        assert prompts == PROMPTS and handle.group_size == SIZE and handle.max_tokens == 24
        start, wait = handle.encode("<"), handle.encode("ok")
        assert handle.decode(wait) == "ok"
        first = each(handle, after=start, max_tokens=6)
        before = [[*start, *one.ids[:4], *wait] for one in first]
        second = handle.generate([Ask(*place, after=ids) for place, ids in zip(PLACES, before, strict=True)])
        kept.update(zip(PLACES, zip(first, second, strict=True), strict=True))
        return [
            Rolled(*place, [*ids, *other.ids], [None, *one.logp[:4], *[None] * (len(ids) - 1 - len(one.ids[:4])), *other.logp])
            for place, ids, one, other in zip(PLACES, before, first, second, strict=True)
        ]

    found = sampled(engine, forced)
    for place, completion in zip(PLACES, found, strict=True):
        one, other = kept[place]
        length = len(one.ids[:4])
        end = length + 3 + len(other.ids)
        assert completion.spans == (Span(1, 1 + length, 0), Span(length + 3, end, 0))
        start, wait = (byte_tokenizer()(text).input_ids for text in ("<", "ok"))
        assert completion.token_ids.tolist() == [*start, *one.ids[:4], *wait, *other.ids]
        expected = np.array([np.nan, *one.logp[:4], np.nan, np.nan, *other.logp], dtype=np.float32)
        assert completion.logp.tobytes() == expected.tobytes()
        assert completion.finish_reason == ("stop" if other.stopped else "length") and len(completion.token_ids) <= 24
    assert all(text[0] == "<" and "ok" in text for text in texts_of(found))
    assert len({answer.ids[0] for pair in kept.values() for answer in pair}) > 4, "each request has a seed of its own"


def test_an_answer_may_be_cut_and_gone_on_with(engine: TransformersEngine) -> None:
    def again(prompts: Sequence[Prompt], handle: Handle) -> list[Rolled]:
        first = each(handle)
        more = handle.generate([Ask(*place, after=one.ids[:3]) for place, one in zip(PLACES, first, strict=True)])
        return [
            Rolled(*place, one.ids[:3] + other.ids, one.logp[:3] + other.logp)
            for place, one, other in zip(PLACES, first, more, strict=True)
        ]

    for completion in sampled(engine, again):
        assert completion.spans == (Span(0, len(completion.token_ids), 0),)


def test_sampled_ids_may_be_masked(engine: TransformersEngine) -> None:
    """What the engine sampled after them is still proved: they are among the ids before it."""
    whole = sampled(engine, as_it_came)

    def masked(prompts: Sequence[Prompt], handle: Handle) -> list[Rolled]:
        return [
            replace(one, logp=[None if place in (0, 2) else logp for place, logp in enumerate(one.logp)])
            for one in as_it_came(prompts, handle)
        ]

    for one, other in zip(sampled(engine, masked), whole, strict=True):
        length = len(one.token_ids)
        assert length > 4 and one.spans == (Span(1, 2, 0), Span(3, length, 0))
        assert np.flatnonzero(np.isnan(one.logp)).tolist() == [0, 2]
        assert np.array_equal(one.token_ids, other.token_ids) and one.finish_reason == other.finish_reason
        assert np.delete(one.logp, [0, 2]).tobytes() == np.delete(other.logp, [0, 2]).tobytes()


WRONG: dict[str, dict[str, Any]] = {
    "no logp": {"logp": None},
    "text": {"ids": "ab"},
    "too large": {"ids": [2**40]},
    "nested": {"ids": [[5]]},
}


def changed(how: str) -> Function:
    def function(prompts: Sequence[Prompt], handle: Handle) -> list[Rolled]:
        rolled = as_it_came(prompts, handle)
        one, other = rolled[0], rolled[4]
        ids, logp = list(one.ids), list(one.logp)
        if how == "id":
            ids[2] += 1
        if how == "log-prob":
            logp[1] = float(np.nextafter(np.float32(logp[1]), np.float32(0)))
        if how == "masked":  # and another id than the engine sampled
            ids[2], logp[2] = ids[2] + 1, None
        if how == "log-prob after a masked id":
            logp[1:3] = [None, logp[1]]
        if how == "shifted":
            logp = [*logp[1:], logp[0]]
        if how == "other prompt":
            ids, logp = list(other.ids), list(other.logp)
        if how == "inserted":
            ids.insert(1, 65)
            logp.insert(1, -0.5)
        if how == "after another start":
            ids, logp = [65, *ids[:-1]], [None, *logp[:-1]]
        if how == "in place of another start":
            (begun,) = handle.generate([Ask(0, 0, after=[65])])
            ids, logp = [66, *begun.ids], [None, *begun.logp]
        if how == "none":
            logp = [None] * len(ids)
        if how == "short":
            logp = logp[:-1]
        if how == "long":
            ids, logp = [*ids, *[65] * 30], [*logp, *[None] * 30]
        rolled[0] = Rolled(0, 0, ids, logp)
        if how == "twice":
            rolled[1] = rolled[0]
        if how == "missing":
            rolled.pop()
        if how == "further":
            rolled.append(Rolled(2, 0, ids, logp))
        if how == "no record":
            rolled[3] = (ids, logp)  # type: ignore[call-overload]
        if how == "nothing":
            rolled[3] = None  # type: ignore[call-overload]
        if how in WRONG:
            rolled[0] = Rolled(0, 0, **{"ids": ids, "logp": logp, **WRONG[how]})
        if how == "raises":
            raise KeyError("x")
        if how == "asks too much":
            handle.generate([Ask(0, 0, after=[65] * 24)])
        if how == "asks beyond":
            handle.generate([Ask(0, SIZE)])
        return rolled

    return function


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("id", r"id \d+ at place 2 has the log-prob .*did not sample it with this log-prob after the 2 ids before it"),
        ("log-prob", "at place 1 has the log-prob"),
        ("masked", "at place 3 has the log-prob .* after the 3 ids before it"),
        ("log-prob after a masked id", "at place 2 has the log-prob"),
        ("shifted", "at place 0 has the log-prob"),
        ("other prompt", "at place 0 has the log-prob"),
        ("inserted", "id 65 at place 1 has the log-prob -0.5,"),
        ("after another start", "at place 1 has the log-prob .* after the 1 ids before it"),
        ("in place of another start", "at place 1 has the log-prob .* after the 1 ids before it"),
        ("none", "none of its ids was sampled"),
        ("long", r"has \d\d ids, more than rollout.max_completion_tokens 24"),
    ],
)
def test_what_the_engine_did_not_sample_is_refused_with_its_place(engine: TransformersEngine, how: str, text: str) -> None:
    with pytest.raises(SentinelError, match=text) as caught:
        sampled(engine, changed(how))
    assert caught.value.fault == Fault.FOREIGN_TOKENS
    assert "rollout.use mine.py:f, prompt at position 5, sample 0: foreign_tokens" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("short", "missing_logprobs: it has .* ids and .* log-probs"),
        ("twice", "returned sample 0 of prompt 0 2 times; it must return each of 3 samples of 2 prompts once"),
        ("missing", "returned sample 2 of prompt 1 0 times"),
        ("further", "returned sample 0 of prompt 2 1 times"),
        ("no record", "returned a tuple; it must return a list of rlgen.rollout.custom.Rolled"),
        ("nothing", "returned a NoneType; it must return a list of rlgen.rollout.custom.Rolled"),
        ("no logp", "sample 0: ids must be a list of token ids, .* numbers and None: ids is a list, logp a NoneType"),
        ("text", "logp one of numbers and None: invalid literal"),
        ("too large", "logp one of numbers and None: Python int"),
        ("nested", "logp one of numbers and None: ids is a list, logp a list"),
        ("raises", "rollout.use mine.py:f raised KeyError: 'x'"),
        ("asks too much", "`after` has 24 ids, which leaves no room in rollout.max_completion_tokens 24"),
        ("asks beyond", "names none of the 2 prompts with 3 samples each"),
    ],
)
def test_other_mistakes_are_said(engine: TransformersEngine, how: str, text: str) -> None:
    with pytest.raises((ToolError, EngineError), match=text):
        sampled(engine, changed(how))


def test_the_rollout_of_the_page(engine: TransformersEngine) -> None:
    """The page rlgen/docs/rollouts.md: its function samples twice, with its word in between."""
    page = (ROOT / "rlgen" / "docs" / "rollouts.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0].replace("THINKING = 200", "THINKING = 5"), names)
    wait = byte_tokenizer()("\nWait.").input_ids
    found = sampled(engine, names["think_longer"])
    for completion in found:
        ids, (first, second) = completion.token_ids.tolist(), completion.spans
        assert ids[first.stop : second.start] == wait and first.stop <= 5 and second.stop == len(ids)
    assert all("\nWait." in text[1:] for text in texts_of(found))


def texts_of(found: list[Completion]) -> list[str]:
    """What a reward gets as `completion`, and the rollouts have: the text of all ids but the stop token at the end."""
    groups = build_groups(PROMPTS, requests_for(PROMPTS, SIZE, 3), found, SAMPLING, byte_tokenizer())
    samples = [sample for group in groups for sample in group.samples]
    writer = rollout_writer(Path(), prompt_at=lambda position: PROMPTS[position % 2], stop_ids=SAMPLING.stop_ids)
    texts, _ = writer.texts(Samples.of(samples))
    writer.close()
    assert [*map(writer.text_of, samples)] == texts["completion"].to_pylist() == [sample.completion for sample in samples]
    for sample in samples:
        ids = sample.completion_ids[: len(sample.completion_ids) - (sample.finish_reason == "stop")]
        assert sample.completion == byte_tokenizer().decode(ids, skip_special_tokens=True)
    return [sample.completion for sample in samples]


MINE = """\
from rlgen.rollout.custom import Ask, Rolled


def plain(prompts, engine, start=()):
    places = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(engine.group_size)]
    answers = engine.generate([Ask(*place, after=start) for place in places])
    return [Rolled(*place, [*start, *one.ids], [None] * len(start) + [*one.logp]) for place, one in zip(places, answers)]


def forced(prompts, engine):
    return plain(prompts, engine, engine.encode(">"))
"""


@pytest.mark.slow
def test_a_run_with_one_that_changes_nothing_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    found = {}
    for name in ("usual", "plain", "forced"):
        given = ["engine={kind: transformers}", *([] if name == "usual" else [f"rollout.use=mine.py:{name}"])]
        train_command(tmp_path / "recipe.yaml", given, False, False, None, tmp_path / name)
        records = read_jsonl(tmp_path / name / "metrics.jsonl")
        found[name] = [{key: one[key] for key in one if not key.startswith("time/")} for one in records]
    assert found["plain"] == found["usual"]
    forced, rows = found["forced"][1], read_rollouts(tmp_path / "forced", 2).to_pylist()
    assert forced["sampler/delta_max"] < 1e-4
    for row in rows:
        assert row["loss_mask"] == [False] + [True] * (len(row["completion_ids"]) - 1)
        assert np.isnan(row["sampler_logp"]).tolist() == [not one for one in row["loss_mask"]]
    capsys.readouterr()
    replay_command(tmp_path / "forced", 2, [], True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["differences"] == {}
    assert forced["tokens/generated"] == sum(len(row["completion_ids"]) - 1 for row in rows)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("tools=[{use: 'mine.py:f'}]", "rollout.use leads conversations itself, and so do tools"),
        ("eval={limit: 2}", "rollout.use is not called by evaluations"),
        ("rollout.async_steps=1", "rollout.use is called when a step needs its samples"),
        ("engine.tensor_parallel_size=2", "rollout.use would be called once in each process that shares the engine"),
        ("rollout.use=mine", "`mine` is not a file.py:function or pkg.mod:function"),
    ],
)
def test_what_contradicts_it_is_refused(recipe_file: Path, change: str, text: str) -> None:
    assert text in "\n".join(problems(recipe_file, "rollout.use=mine.py:plain", change))
