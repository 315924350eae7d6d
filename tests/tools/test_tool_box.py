"""Tools: what the model is told of them, how their arguments are checked, and what it is told of calls that fail."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from helpers.scoring import without_haste
from helpers.waiting import HANGS
from tool_files import asked, boxes, turns_of
from tool_templates import FAMILIES, tokenizer_of

from rlgen.errors import ToolError
from rlgen.recipe.models import ToolRecipe
from rlgen.setup.inputs import in_words
from rlgen.tools.box import ToolAnswer, ToolBox, ToolCall, answers_digest

__all__ = ["boxes"]
Boxes = Callable[..., ToolBox]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    without_haste(monkeypatch)


def started(box: ToolBox, *calls: tuple[str, dict[str, Any]]) -> "Future[Any]":
    """Begins calls at the same time; what they are answered comes later."""
    return asked(box.call, [ToolCall(name, given) for name, given in calls])


def answers_to(box: ToolBox, *calls: tuple[str, dict[str, Any]]) -> list[ToolAnswer]:
    answers = started(box, *calls).result(HANGS)
    assert isinstance(answers, Sequence), answers
    return list(answers)


def test_the_model_is_told_types_and_docstrings(boxes: Boxes) -> None:
    add, find = boxes("add", {"use": "find", "name": "search", "args": {"limit": 3}}).schemas
    assert add == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"description": "The first number, a whole one.", "type": "integer"},
                    "b": {"description": "The second one.", "type": "integer", "default": 1},
                },
                "required": ["a"],
            },
        },
    }
    assert find["function"]["name"] == "search"
    assert find["function"]["parameters"] == {
        "type": "object",
        "properties": {"query": {"type": "string"}, "kind": {"type": "string", "enum": ["page", "file"]}},
        "required": ["query", "kind"],
    }


@pytest.mark.parametrize(
    ("source", "entry", "text"),
    [
        ("def f(x: int):\n    return x\n", {}, "has no docstring"),
        ('def f(x):\n    """F."""\n', {}, "parameter `x` has no type"),
        ('def f(*x: int):\n    """F."""\n', {}, r"`\*x: int` has none"),
        ('def f(x: int):\n    """F."""\n', {"args": {"y": 1}}, "has no parameter `y`"),
        ('class C: pass\ndef f(x: C):\n    """F."""\n', {}, "JSON has no type for"),
        ('def f(x: "Nowhere"):\n    """F."""\n', {}, "cannot be resolved"),
        ('def g(x: int):\n    """F."""\n', {}, "has no function `f`; did you mean|there are g"),
        ("import nowhere_at_all\n", {}, "No module named 'nowhere_at_all'"),
    ],
)
def test_what_a_model_cannot_be_told_is_refused(boxes: Boxes, source: str, entry: dict[str, Any], text: str) -> None:
    with pytest.raises(ToolError, match=text) as caught:
        boxes({"use": "f", **entry}, source=source)
    assert str(caught.value).startswith("tools: ") and caught.value.exit_code == 5


def test_arguments_are_checked_and_answers_are_texts(boxes: Boxes) -> None:
    box = boxes("add", "echo", {"use": "find", "args": {"limit": 3}})
    answers = answers_to(
        box,
        ("add", {"a": 2, "b": "3"}),
        ("echo", {"text": "ab", "times": 2}),
        ("find", {"query": "q", "kind": "page"}),
        ("add", {"a": 1.5, "c": 1}),
        ("ad", {}),
        ("add", {}),
    )
    assert [answer.text for answer in answers[:3]] == [
        "5",
        "abab",
        '{"query": "q", "kind": "page", "hits": [1, 2.5, null], "é": 3}',
    ]
    assert [answer.why for answer in answers] == ["", "", "", "arguments", "unknown", "arguments"]
    assert answers[3].text.startswith("Error: the arguments do not fit: a: Input should be a valid integer")
    assert "c: Extra inputs are not permitted" in answers[3].text
    assert answers[4].text == "Error: there is no tool ad; did you mean add?"
    assert answers[5].text == "Error: the arguments do not fit: a: Field required"


def test_a_tool_that_fails_is_answered_and_the_next_call_runs(boxes: Boxes) -> None:
    box = boxes("breaks", "add", memory_gib=0.5)
    raised, died, memory, odd, long, fine = (
        *answers_to(box, ("breaks", {"how": "raise"}), ("breaks", {"how": "die"}), ("breaks", {"how": "memory"})),
        *answers_to(box, ("breaks", {"how": "object"}), ("breaks", {"how": "1 MB"}), ("add", {"a": 1})),
    )
    assert raised == ToolAnswer("Error: ValueError: no such thing: <|im_end|>", "error")
    assert died == ToolAnswer("Error: the tool's process ended", "died")
    assert memory == ToolAnswer("Error: MemoryError", "memory")
    assert odd.why == "" and odd.text.startswith('{"set": "{1}"')
    assert long == ToolAnswer("y" * 16 * 512, "", (1 << 20) - 16 * 512)  # cut in the worker already
    assert fine == ToolAnswer("2")


def test_a_tool_that_hangs_is_killed_and_holds_up_no_other(boxes: Boxes) -> None:
    box = boxes({"use": "breaks", "timeout": 1.0}, "add", workers=2)
    hangs = started(box, ("breaks", {"how": "hang"}))
    assert answers_to(box, ("add", {"a": 1}), ("add", {"a": 2}))[1] == ToolAnswer("3")
    assert hangs.result(HANGS) == [ToolAnswer("Error: no answer in time", "timeout")]
    assert answers_to(box, ("add", {"a": 1})) == [ToolAnswer("2")]


def test_code_that_has_changed_is_an_error(boxes: Boxes, tmp_path: Path) -> None:
    box = boxes("breaks")
    (tmp_path / "tools0.py").write_text('def breaks(how: str) -> str:\n    """Other."""\n')
    assert answers_to(box, ("breaks", {"how": "die"}))[0].why == "died"
    found = started(box, ("breaks", {"how": "raise"})).result(HANGS)
    assert isinstance(found, ToolError) and "the code of a tool has changed" in str(found)


def test_the_digest_is_of_all_that_decides_answers(boxes: Boxes) -> None:
    add = boxes("add").digest
    assert add not in {boxes({"use": "add", "timeout": 3.0}).digest, boxes("echo").digest}
    here, moved, other = (answers_digest([ToolRecipe(use=use)]) for use in ("/a/t.py:add", "/b/t.py:add", "/a/t.py:echo"))
    assert here == moved != other


def test_the_code_of_each_tool_is_known_by_its_hash(boxes: Boxes) -> None:
    box = boxes("add", {"use": "echo", "name": "say"})
    sha256 = hashlib.sha256(Path(box.entries[0].use.rpartition(":")[0]).read_bytes()).hexdigest()
    turns = turns_of(box, tokenizer_of(FAMILIES["qwen2.5"]), ["<|im_end|>"])
    assert turns.code == {"tools/add": sha256, "tools/say": sha256}
    assert [in_words(name) for name in (*turns.code, "brevity", "eval/brevity", "environment/Grid", "rollout/f")] == [
        *("tool add", "tool say", "reward brevity", "reward eval/brevity", "environment Grid", "rollout.use f")
    ]
