"""Every error that a user can meet, with its exit code.

A message says where, what and what to do, in one line if possible. `rlgen` prints it and exits with `exit_code`; a traceback
appears only with `--debug`. An exception that is not an `RlgenError` is a bug in rlgen (exit 70).
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rlgen.redact import redacted


class RlgenError(Exception):
    """Base of all expected failures. `str(error)` is the whole message for the user, with secrets redacted."""

    exit_code = 70
    told = False  # True: another process of the run prints the message

    def __str__(self) -> str:
        return redacted(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        """Keeps the message and the attributes; without this, pickle would call `__init__` with the message alone."""
        return Exception.__new__, (type(self), *self.args), self.__dict__


class UsageError(RlgenError):
    """The command line is wrong: an option, or a run directory that is in use."""

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
    """A recipe has mistakes. The message lists them all.

    `problems` are in line order.
    """

    exit_code = 2

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))


class SetupError(RlgenError):
    """The machine or the model lacks something: a package, a device, memory, a file of weights."""

    exit_code = 3


class DataError(RlgenError):
    """The data set cannot be used: a column is missing, or no rows are left."""

    exit_code = 4


class RewardError(RlgenError):
    """A reward function cannot be found or called, or it failed."""

    exit_code = 5


class ToolError(RlgenError):
    """A tool cannot be found or described to the model. If a call raises, the run goes on: the model reads the exception."""

    exit_code = 5


class CodeError(RlgenError):
    """Your own algorithm or callback cannot be found, or it failed."""

    exit_code = 5


class EngineError(RlgenError):
    """The engine failed, gave answers that do not fit the requests, or did not load the weights."""

    exit_code = 6


class ServerLost(EngineError):
    """A server cannot be reached, died or hangs. If rlgen cannot recover it, the run ends: start the server, then --resume.

    The requests can be repeated once the server holds the weights again.
    """

    def __init__(self, url: str, what: str) -> None:
        self.url, self.what = url, what
        super().__init__(f"the vLLM server {url} {what}")


class Fault(StrEnum):
    """The kinds of disagreement between engine and trainer. The names are part of messages and do not change."""

    what: str

    def __new__(cls, name: str, what: str) -> "Fault":
        member = str.__new__(cls, name)
        member._value_, member.what = name, what
        return member

    TEMPLATE_MISMATCH = "template_mismatch", "Trainer and engine turn the same text into different prompt ids."
    SPECIAL_TOKENS = "special_tokens", "Trainer and engine use different EOS, BOS or pad ids."
    ENGINE_SETTINGS = "engine_settings", "The engine's dtype, head, vocabulary or token limit differs from the trainer's."
    FLATTENED_COMPLETIONS = "flattened_completions", "Every token came back as a completion of its own."
    MISSING_PROMPT = "missing_prompt", "A prompt was dropped, repeated or replaced."
    COMPLETION_ORDER = "completion_order", "The completions are in a different order from the prompts."
    DROPPED_STOP_TOKEN = "dropped_stop_token", "A completion lacks the id that ended it."
    UNKNOWN_IDS = "unknown_ids", "A completion has ids that the vocabulary lacks."
    MISSING_LOGPROBS = "missing_logprobs", "An id has no log-prob, or an impossible one: above 0, infinite or NaN."
    FOREIGN_TOKENS = "foreign_tokens", "Your rollout function marks ids as sampled that the engine did not sample there."
    SHIFTED_LOGPROBS = "shifted_logprobs", "A token has the log-prob of its neighbour."
    NUMERICS = "numerics", "Ids and weights are the same, but the log-probs differ from the start."
    RAW_LOGPROBS = "raw_logprobs", "The log-probs are those of the logits before the temperature is applied."
    WRONG_TEMPERATURE = "wrong_temperature", "Trainer and engine compute at different temperatures."
    TRUNCATED_SUPPORT = "truncated_support", "Trainer and engine keep different tokens under top-p, top-k or min-p."
    INCOMPLETE_SYNC = "incomplete_sync", "Tensors did not arrive, or were not loaded."
    STALE_TENSOR = "stale_tensor", "One tensor is of an earlier version."
    STALE_HEAD = "stale_head", "The head's copy of a tied embedding is of an earlier version."
    STALE_WEIGHTS = "stale_weights", "All weights are of an earlier version."
    SWAPPED_TENSORS = "swapped_tensors", "Two tensors of equal shape have changed places."
    ADAPTER_IGNORED = "adapter_ignored", "The engine uses the base model without the adapter."
    BASE_CHANGED = "base_changed", "Frozen weights under an adapter have changed."
    STALE_PREFIX_CACHE = "stale_prefix_cache", "The prefix cache reuses activations of earlier weights."
    DECODE_PREFILL = "decode_prefill", "Decoding and prefilling give different log-probs."
    BATCH_DEPENDENCE = "batch_dependence", "The other completions of a batch change a completion."
    SPLIT_DEPENDENCE = "split_dependence", "The split into micro-batches changes the gradient."
    STALE_ROLLOUTS = "stale_rollouts", "Samples come from older weights than the training loop assumes."
    BLIND_BOUNDS = "blind_bounds", "The bounds would hide every fault."
    DRIFT = "drift", "A gap appeared during training, and no known cause fits."
    UNEXPLAINED = "unexplained", "No known cause explains the gap."


class SentinelError(EngineError):
    """Engine and trainer disagree: training on these samples would be training on garbage.

    `sentence` says what was measured and what to do; `where`, a rung, step or sync, comes before it.
    """

    def __init__(self, fault: Fault, sentence: str, where: str = "") -> None:
        self.fault, self.sentence, self.where = fault, sentence, where
        super().__init__(": ".join(part for part in ("sentinel", where, fault.value, sentence) if part))


class DivergedError(RlgenError):
    """Too many updates in a row were not finite, weights are not finite, or a rule of `health` ended the run."""

    exit_code = 7


class CheckpointError(RlgenError):
    """A checkpoint cannot be written or read."""

    exit_code = 8


class DamagedCheckpoint(CheckpointError):
    """A checkpoint differs from what was written, or was never finished. `--resume` uses the newest good one."""


class ProcessError(RlgenError):
    """The wrong number of processes runs, or the processes cannot work together."""

    exit_code = 9


class Stopped(RlgenError):
    """Stopped on request after a good checkpoint: run again with --resume."""

    exit_code = 75

    def __init__(self, message: str, run: Path) -> None:
        self.run = run
        super().__init__(message)


# In a few words; `rlgen docs exit-codes` says more.
EXIT_CODES = {
    0: "done",
    2: "a mistake on the command line or in the recipe",
    3: "the machine or the model lacks something",
    4: "the data cannot be used",
    5: "a reward, a callback or an algorithm of yours failed, or a tool cannot be found",
    6: "the engine failed, or engine and trainer disagree",
    7: "the run diverged",
    8: "a checkpoint cannot be written or read",
    9: "the processes are not those that were asked for",
    70: "a bug in rlgen",
    75: "stopped on request; --resume goes on",
    130: "stopped at once; --resume goes on from the last checkpoint",
}
