"""What all parts of a recipe are made of."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr


class Strict(BaseModel):
    """Unknown keys, NaN and infinities are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


Text = Annotated[StrictStr, Field(min_length=1, max_length=4096)]
Count = Annotated[StrictInt, Field(ge=1, le=10**9)]
Scalar = StrictBool | StrictInt | Annotated[float, Field(strict=True)] | StrictStr
Number = Annotated[float, Field(strict=True, ge=-1e6, le=1e6)]
Dtype = Literal["float32", "bfloat16"]
