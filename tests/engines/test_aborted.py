"""What was not ended by a stop token or by the limit is no completion: it is asked again or ends the run, and never scored."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rlgen.engines.answer import Labelled, packed, read_answer
from rlgen.engines.colocated import ColocatedEngine
from rlgen.errors import EngineError, ServerLost

Proof = Callable[[str], None]
URL = "http://127.0.0.1:9"
USAGE = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 128}}


def as_json(reason: str | None) -> bytes:
    """What vLLM's route for ids answers."""
    content = [{"logprob": -0.5}, {"logprob": -1.0}]
    choice = {
        "token_ids": [7, 8],
        "finish_reason": reason,
        "logprobs": {"content": content},
        "weight_versions": [{"version": "r.3", "start": 0, "end": 2}],
    }
    return msgspec.json.encode({"choices": [choice], "prompt_token_ids": [1], "usage": USAGE})


def as_arrays(reason: str | None) -> bytes:
    """What rlgen's route answers."""
    return packed([1], [7, 8], [-0.5, -1.0], reason, [Labelled("r.3", 0, 2)], 128)


@pytest.mark.fault(53)
@pytest.mark.parametrize("reason", ["abort", "error", None, "tool_calls"])
def test_an_answer_that_was_aborted_is_none(proof: Proof, reason: str) -> None:
    for form in (as_json, as_arrays):
        assert list(read_answer(form("length"), form is as_arrays, URL, lambda label: 3).token_ids) == [7, 8]
        with pytest.raises(ServerLost, match=f"finish_reason {reason!r}: something other than rlgen stopped it") as lost:
            read_answer(form(reason), form is as_arrays, URL, lambda label: 3)
        assert lost.value.exit_code == 6  # unless it is brought back, and the answer asked again
    output = SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason, token_ids=[7], logprobs=None)])
    with pytest.raises(EngineError, match=f"finish_reason {reason!r}, not stop or length"):
        ColocatedEngine._completion(SimpleNamespace(_version=0), output)  # type: ignore[arg-type]
    proof(f"an answer with finish_reason {reason!r}, two tokens in it, in both forms")


@pytest.mark.parametrize("arrays", [False, True])
def test_an_answer_is_read_whole_or_not_at_all(arrays: bool) -> None:
    whole = (as_arrays if arrays else as_json)("stop")
    asked: list[Any] = []
    answer = read_answer(whole, arrays, URL, lambda label: asked.append(label) or 3)  # type: ignore[func-returns-value]
    assert (list(answer.token_ids), list(answer.logp), list(answer.prompt_ids)) == ([7, 8], [-0.5, -1.0], [1])
    assert (answer.finish_reason, answer.weight_version, asked) == ("stop", 3, ["r.3"])
    assert answer.cached_tokens == 128, "the sentinel's probe of the cache goes by it"
    for cut in (0, 3, len(whole) // 2, len(whole) - 1):
        with pytest.raises(ServerLost, match="sent a response that is not a completion"):
            read_answer(whole[:cut], arrays, URL, lambda label: 3)
    with pytest.raises(ValueError, match="2 ids and 1 log-probs"):
        packed([1], [7, 8], [-0.5], "stop", [], 0)
