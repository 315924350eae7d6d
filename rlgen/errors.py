"""Every error a user can meet, with its exit code.

A message says where, what and what to do, in one line if it can. `rlgen` prints it and ends with `exit_code`; a traceback
appears only with `--debug`. An exception that is not an `RlgenError` is a bug in rlgen (exit 70).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlgen.redact import redacted


class RlgenError(Exception):
    """Base of all expected failures. `str(error)` is the whole message for the user, without secrets."""

    exit_code = 70
    told = False  # another process of the run prints it

    def __str__(self) -> str:
        return redacted(super().__str__())


class UsageError(RlgenError):
    """A wrong command line: an option, a run directory that is taken."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a recipe.

    Problem(where="demo.yaml:17:3", what="`clip_hgih` is not a key of `trainer` (kind: grpo)", hint="did you mean `clip_high`?")
    """

    where: str
    what: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"; {self.hint}" if self.hint else "")


class RecipeError(RlgenError):
    """All mistakes of one recipe, in line order."""

    exit_code = 2

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,), {"args": self.args}


class SetupError(RlgenError):
    """The machine or the model lacks something: a package, a device, memory, a file of weights."""

    exit_code = 3


class DataError(RlgenError):
    """The data set cannot serve: a missing column, no rows left."""

    exit_code = 4


class RewardError(RlgenError):
    """A reward function cannot be found, called, or it failed."""

    exit_code = 5


class EngineError(RlgenError):
    """The engine failed, answered something else than it was asked, or did not take the weights."""

    exit_code = 6


class ServerLost(EngineError):
    """A server that cannot be reached, died or hangs. What it was asked can be asked again once it holds the weights again.

    Args:
        url: of the server.
        what: "closed the connection".
    """

    def __init__(self, url: str, what: str) -> None:
        self.url, self.what = url, what
        super().__init__(f"the vLLM server {url} {what}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.what), {"args": self.args}


class Fault(StrEnum):
    """What can be wrong between engine and trainer. The names are part of messages and do not change."""

    TEMPLATE_MISMATCH = "template_mismatch"  # one text, other prompt ids
    SPECIAL_TOKENS = "special_tokens"  # other EOS, BOS or pad id
    ENGINE_SETTINGS = "engine_settings"  # other dtype, head or vocabulary
    FLATTENED_COMPLETIONS = "flattened_completions"  # every token came as a completion
    MISSING_PROMPT = "missing_prompt"  # a prompt was dropped, repeated or replaced
    COMPLETION_ORDER = "completion_order"  # answers stand in another order than the questions
    DROPPED_STOP_TOKEN = "dropped_stop_token"  # the id that ended a completion is not in it
    MISSING_LOGPROBS = "missing_logprobs"  # fewer log-probs than ids, or none
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
    ADAPTER_IGNORED = "adapter_ignored"  # the engine computes with the base model
    BASE_CHANGED = "base_changed"  # frozen weights under an adapter are not what they were
    STALE_PREFIX_CACHE = "stale_prefix_cache"  # activations of earlier weights are reused
    DECODE_PREFILL = "decode_prefill"  # decoding computes otherwise than prefilling
    BATCH_DEPENDENCE = "batch_dependence"  # neighbours change the answer
    SPLIT_DEPENDENCE = "split_dependence"  # micro-batches change the gradient
    STALE_ROLLOUTS = "stale_rollouts"  # sampled by earlier weights than the loop takes them for
    BLIND_BOUNDS = "blind_bounds"  # the recipe's bounds would hide every fault
    DRIFT = "drift"  # a gap that came while training, without a known cause
    UNEXPLAINED = "unexplained"  # a gap that no rival explains


class SentinelError(EngineError):
    """Engine and trainer disagree: training on these samples would be training on garbage.

    Args:
        fault: the cause.
        sentence: what was seen and what to do.
        where: rung, step or sync; the place comes before the sentence.
    """

    def __init__(self, fault: Fault, sentence: str, where: str = "") -> None:
        self.fault, self.sentence, self.where = fault, sentence, where
        super().__init__(": ".join(part for part in ("sentinel", where, fault.value, sentence) if part))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fault, self.sentence, self.where), {"args": self.args}


class DivergedError(RlgenError):
    """A loss or gradient is not finite."""

    exit_code = 7


class CheckpointError(RlgenError):
    """A checkpoint cannot be written or read."""

    exit_code = 8


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not what was written, or was never finished: one before it may be good."""


class ProcessError(RlgenError):
    """The processes that run are not the ones that were asked for."""

    exit_code = 9


class Stopped(RlgenError):
    """Stopped on request after a good checkpoint: run again with --resume."""

    exit_code = 75
