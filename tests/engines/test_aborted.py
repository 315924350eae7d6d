"""What was not ended by a stop token or by the limit is no completion: it is asked again or ends the run, and never scored."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.http import Server
from rlgen.errors import EngineError, ServerLost

Proof = Callable[[str], None]


def answer(reason: str) -> dict[str, Any]:
    """What vLLM's route for ids answers."""
    content = [{"logprob": -0.5}, {"logprob": -1.0}]
    choice = {
        "token_ids": [7, 8],
        "finish_reason": reason,
        "logprobs": {"content": content},
        "weight_versions": [{"version": "r.3"}],
    }
    return {"choices": [choice], "prompt_token_ids": [1], "usage": None}


@pytest.mark.fault(53)
@pytest.mark.parametrize("reason", ["abort", "error", None, "tool_calls"])
def test_an_answer_that_was_aborted_is_none(proof: Proof, reason: str) -> None:
    server = Server("http://127.0.0.1:9", "token", 1.0)
    assert server.completion(answer("length"), lambda label: 3).token_ids == (7, 8)
    with pytest.raises(ServerLost, match=f"finish_reason {reason!r}: it was stopped by somebody else") as lost:
        server.completion(answer(reason), lambda label: 3)
    assert lost.value.exit_code == 6  # unless it is brought back, and the answer asked again
    output = SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason, token_ids=[7], logprobs=None)])
    with pytest.raises(EngineError, match=f"finish_reason {reason!r}, not stop or length"):
        ColocatedEngine._completion(SimpleNamespace(_version=0), output)  # type: ignore[arg-type]
    proof(f"an answer with finish_reason {reason!r}, two tokens in it")
