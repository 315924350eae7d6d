"""Holds the `args` of the rewards that ask a model: `reward_model`, in a worker, and `judge`, behind an API."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictBool, StrictInt, StrictStr, model_validator

from rlgen.recipe.fields import Count, Dtype, Number, Seconds, Strict, Text, Variable
from rlgen.recipe.models import RewardRecipe
from rlgen.redact import SECRET_VARIABLE

PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")  # of a template; other braces, such as those of JSON, stay as they are
LongText = Annotated[StrictStr, Field(min_length=1, max_length=100_000)]

RATING = """\
Rate the answer to the task from 0 (useless) to 10 (perfect). Explain in a few sentences, then write one line "Score: N".

Task:
{prompt}

Answer:
{completion}
"""
COMPARISON = """\
Two answers to the same task follow. Say in a few sentences which one is better, then write [[A]], [[B]], or [[C]] for a tie.

Task:
{prompt}

Answer A:
{first}

Answer B:
{second}
"""
SCORE = r"Score:\s*(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
VERDICT = r"\[\[([ABC])\]\]"


def is_pattern(text: str) -> str:
    """Returns the text. Raises ValueError unless it is a regular expression with one group."""
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise ValueError(f"must be a regular expression of Python ({error})") from None
    if groups != 1:
        raise ValueError(f"must have one group, which is the score; this one has {groups}")
    return text


def is_address(text: str) -> str:
    """Returns the text. Raises ValueError unless it is an http or https address without user, password, query or fragment."""
    if not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", text):
        raise ValueError("must be the address of an API such as http://127.0.0.1:8000/v1, without a user, password or query")
    if text.rstrip("/").endswith("/completions"):
        raise ValueError(f"must be the address alone, {re.sub(r'(/chat)?/completions/?$', '', text)}: the rest is added")
    return text


def is_secret_variable(text: str) -> str:
    """Returns the text. Raises ValueError unless every output of rlgen leaves out the value of a variable of this name."""
    if not SECRET_VARIABLE.fullmatch(text):
        raise ValueError("must be a name that rlgen treats as a secret and never prints, such as JUDGE_API_KEY")
    return text


class ModelRewardArgs(Strict):
    pairwise: StrictBool = False
    """Compare the completions of a prompt with each other; the reward is then a win rate from 0 to 1."""


class RewardModelArgs(ModelRewardArgs):
    path: Text
    """Folder or hub id of a sequence-classification model with one label."""
    revision: Text | None = None
    """Branch, tag or commit of a hub id."""
    dtype: Dtype = "bfloat16"
    """Dtype of the weights. A linear head is always computed in float32."""
    device: Annotated[StrictStr, Field(pattern=r"^(cpu|cuda(:\d{1,3})?)$")] | None = None
    """cpu or cuda:N. None: the GPU of the training process, or the CPU if there is no GPU."""
    chat: StrictBool | None = None
    """true: apply the reward model's chat template. false: pass what the policy sees. None: true if prompts are chats."""
    max_tokens: Count | None = None
    """Longest row (prompt and completion), in tokens. None: the longest that the model takes."""
    overlong: Literal["error", "truncate"] = "error"
    """If a row is too long: fail the call (error), or cut off its start, count it and note it in logs/rewards.log (truncate)."""
    batch_tokens: Count = 16384
    """Most tokens that go through the model together, padding included; a longer row goes alone."""
    load_timeout: Annotated[float, Field(strict=True, ge=0.1, le=86400)] = 600.0
    """Seconds that loading the model may take, download included."""


class JudgeArgs(ModelRewardArgs):
    url: Annotated[Text, AfterValidator(is_address)]
    """Address of an OpenAI-compatible API, without /chat/completions."""
    model: Text
    """Name of the model at that address."""
    key_env: Annotated[Variable, AfterValidator(is_secret_variable)] | None = None
    """Environment variable that holds the key. None: no key is sent."""
    prompt: LongText | None = None
    """The question, with {prompt}, {completion} and columns of the data in braces; if pairwise, {first} and {second} instead of
    {completion}. None: the default question, which asks for a score from 0 to 10, or for the better answer if pairwise."""
    prompt_file: Text | None = None
    """File with the question, instead of `prompt`."""
    system: LongText | None = None
    """System message before the question."""
    pattern: Annotated[LongText, AfterValidator(is_pattern)] | None = None
    """Regular expression whose group is the score; its last match counts. None: the one that fits the default question."""
    field: Text | None = None
    """Key of the score in the last JSON object of the answer, instead of `pattern`."""
    low: Number = 0.0
    """Lowest score; a lower one is a failure. A pairwise judge answers A, B or C (tie) instead of a number."""
    high: Number = 10.0
    """Highest score; a higher one is a failure."""
    max_tokens: Count = 1024
    """Longest answer."""
    extra: dict[StrictStr, Any] | None = None
    """Further keys of each request, such as reasoning_effort; null removes one that is sent by default, such as temperature."""
    concurrency: Annotated[StrictInt, Field(ge=1, le=10_000)] = 32
    """Most requests at once, for each training process."""
    request_timeout: Seconds | None = None
    """Seconds that one request may take; then it is sent again. None: the entry's `timeout`, which covers all retries."""
    retries: Annotated[StrictInt, Field(ge=0, le=100)] = 5
    """How often a request is sent again after 408, 409, 425, 429, 5xx, a lost connection or its timeout, with growing pauses."""
    budget_requests: Count | None = None
    """Most requests of the run, resumes included; each further one fails. Every training process gets an equal share."""
    budget_tokens: Count | None = None
    """Most tokens of the run, as the `usage` of the answers counts them."""

    @model_validator(mode="after")
    def check(self) -> "JudgeArgs":
        """Raises ValueError for settings that contradict each other."""
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("`prompt` and `prompt_file` both set the question; remove one of them")
        if self.pattern is not None and self.field is not None:
            raise ValueError("`pattern` and `field` both say where the score is; remove one of them")
        if self.field is not None and self.prompt is None and self.prompt_file is None:
            raise ValueError("`field` needs `prompt` or `prompt_file`: the default question asks for no JSON")
        if self.low >= self.high:
            raise ValueError(f"`low` {self.low:g} is not below `high` {self.high:g}")
        if self.prompt is not None:
            self.check_question(self.prompt)
        if (self.prompt or self.prompt_file) and self.pattern is None and self.field is None:
            raise ValueError("a question of your own needs `pattern` or `field`, which say where the score is in the answer")
        return self

    def check_question(self, question: str) -> None:
        """Raises ValueError if the question does not show what is judged."""
        names, wanted = set(PLACEHOLDER.findall(question)), ("first", "second") if self.pairwise else ("completion",)
        if missing := [name for name in wanted if name not in names]:
            raise ValueError(f"the question has no {{{missing[0]}}}, so the judge would not see what it judges")
        other = {"completion"} if self.pairwise else {"first", "second"}
        if wrong := sorted(names & other):
            how = "pairwise is true: write {first} and {second}" if self.pairwise else "pairwise is false: write {completion}"
            raise ValueError(f"the question has {{{wrong[0]}}}, but {how}")


# `use` -> the model of its `args`.
MODEL_REWARDS: Mapping[str, type[RewardModelArgs] | type[JudgeArgs]] = {"reward_model": RewardModelArgs, "judge": JudgeArgs}
# Argument of such a reward -> True: it is always a local file; False: it is a local folder if one of that name exists.
LOCAL_ARGS = {"path": False, "prompt_file": True}


def settings_of(reward: RewardRecipe) -> RewardModelArgs | JudgeArgs | None:
    """Returns the checked `args` of a reward that asks a model; None for any other reward."""
    made = MODEL_REWARDS.get(reward.use)
    return None if made is None else made.model_validate(reward.args)


def pairwise_places(rewards: Sequence[RewardRecipe]) -> list[int]:
    """Returns the indices of the rewards that compare completions of a group."""
    return [index for index, reward in enumerate(rewards) if (found := settings_of(reward)) is not None and found.pairwise]
