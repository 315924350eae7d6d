"""What a check of the sentinel answers: a rung, its verdict, and the name of what is wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rlgen.errors import SentinelError


class Fault(StrEnum):
    """Everything the sentinel can name. The names are part of messages and do not change."""

    TEMPLATE_MISMATCH = "template_mismatch"  # one text, other prompt ids
    SPECIAL_TOKENS = "special_tokens"  # other EOS, BOS or pad id
    ENGINE_SETTINGS = "engine_settings"  # other dtype, head or vocabulary
    FLATTENED_COMPLETIONS = "flattened_completions"  # every token came as a completion
    MISSING_PROMPT = "missing_prompt"  # a prompt was dropped, repeated or replaced
    COMPLETION_ORDER = "completion_order"  # answers stand in another order than the questions
    DROPPED_STOP_TOKEN = "dropped_stop_token"  # the id that ended a completion is not in it
    MISSING_LOGPROBS = "missing_logprobs"  # fewer log-probs than ids, or none
    WRONG_VERSION = "wrong_version"  # the engine names other weights than it was sent
    SHIFTED_LOGPROBS = "shifted_logprobs"  # the log-prob of a neighbour
    NUMERICS = "numerics"  # same ids and weights, other log-probs, from the start
    RAW_LOGPROBS = "raw_logprobs"  # log-probs of the logits before the temperature
    WRONG_TEMPERATURE = "wrong_temperature"  # both sides do not mean the same temperature
    TRUNCATED_SUPPORT = "truncated_support"  # top-p, top-k or min-p
    INCOMPLETE_SYNC = "incomplete_sync"  # tensors that did not arrive, or were not loaded
    STALE_TENSOR = "stale_tensor"  # one tensor is of an earlier version
    STALE_HEAD = "stale_head"  # the head's copy of a tied embedding is
    STALE_WEIGHTS = "stale_weights"  # all of them are
    SWAPPED_TENSORS = "swapped_tensors"  # two tensors of equal shape have changed places
    STALE_PREFIX_CACHE = "stale_prefix_cache"  # activations of earlier weights are reused
    DECODE_PREFILL = "decode_prefill"  # decoding computes otherwise than prefilling
    BATCH_DEPENDENCE = "batch_dependence"  # neighbours change the answer
    SPLIT_DEPENDENCE = "split_dependence"  # micro-batches change the gradient
    STALE_ROLLOUTS = "stale_rollouts"  # sampled by earlier weights than the loop takes them for
    DRIFT = "drift"  # a gap that came while training, without a known cause
    UNEXPLAINED = "unexplained"  # a gap that no rival explains


class Verdict(StrEnum):
    OK = "ok"
    FAILED = "failed"
    NOT_MEASURABLE = "not measurable"  # the check could not have seen the fault
    NOT_NEEDED = "not needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault and, in one sentence, what was seen and what to do."""

    fault: Fault
    sentence: str

    def error(self, where: str) -> SentinelError:
        return SentinelError(f"sentinel, {where}: {self.fault}: {self.sentence}", fault=self.fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One step of the ladder.

    Rung(number=3, name="changed sync", verdict=Verdict.OK, measured={"max_delta": 2e-6}, bound=1e-4, power=0.8, sentence="…")
    """

    number: int
    name: str
    verdict: Verdict
    measured: Mapping[str, float] = field(default_factory=dict)
    bound: float | None = None  # of the first measured value
    power: float | None = None  # how far that value would move if the fault were there
    fault: Fault | None = None  # of a failed one
    sentence: str = ""

    def error(self) -> SentinelError:
        """Of a failed rung."""
        assert self.fault is not None
        return Finding(fault=self.fault, sentence=self.sentence).error(f"rung {self.number} ({self.name})")

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": str(self.verdict), "fault": self.fault and str(self.fault)}


def failed(rungs: Sequence[Rung]) -> Rung | None:
    """The rung where the climb ended, if one failed."""
    return next((rung for rung in rungs if rung.verdict is Verdict.FAILED), None)
