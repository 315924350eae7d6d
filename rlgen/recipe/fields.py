"""Holds the base class and the field types that all parts of a recipe share."""

import re
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

DURATION = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?")
LONGEST = 3650 * 86400  # most seconds of a duration


class Strict(BaseModel):
    """A frozen model that rejects unknown keys, NaN and infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


Text = Annotated[StrictStr, Field(min_length=1, max_length=4096)]
Variable = Annotated[StrictStr, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]  # of the environment
Count = Annotated[StrictInt, Field(ge=1, le=10**9)]
Scalar = StrictBool | StrictInt | Annotated[float, Field(strict=True)] | StrictStr
Number = Annotated[float, Field(strict=True, ge=-1e6, le=1e6)]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
Seconds = Annotated[float, Field(strict=True, ge=0.01, le=86400)]
Dtype = Literal["float32", "bfloat16"]


def moment(text: str, began: float) -> float:
    """Returns seconds since 1970 of "2026-11-22T03:50:00+01:00", or of "3h50m" after `began`.

    Raises:
        ValueError: the text is neither, or the duration is 0 or longer than 3650d.
    """
    found = DURATION.fullmatch(text)
    if found and text:
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        length = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        if not 0 < length <= LONGEST:
            raise ValueError("must be longer than 0s and at most 3650d")
        return began + length
    try:
        at = datetime.fromisoformat(text)
        if at.tzinfo is not None:
            return at.timestamp()
    except (ValueError, OverflowError):
        pass
    raise ValueError("must be a duration such as 3h50m, or a time with its zone such as 2026-11-22T03:50:00+01:00")


def is_moment(text: str) -> str:
    """Returns the text unchanged. Raises ValueError if `moment` cannot read it."""
    moment(text, 0.0)
    return text


def samples_or_greedy(temperature: float) -> float:
    """Returns the temperature. Raises ValueError between 0 and 0.01."""
    if 0 < temperature < 0.01:
        raise ValueError("must be 0.01 or more: below it, rounding decides what is sampled")
    return temperature


Moment = Annotated[StrictStr, Field(max_length=100), AfterValidator(is_moment)]
Temperature = Annotated[float, Field(strict=True, ge=0, le=2.0), AfterValidator(samples_or_greedy)]
