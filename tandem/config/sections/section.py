"""What every section is: frozen, strict, and documented by the sentence under each field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

MOST = 2**31 - 1  # of any whole number: counts and sizes beyond it are slips of the hand; a seed may be any


class Section(BaseModel):
    """A table of the recipe. Unknown keys are errors; the docstring under a field is its documentation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, int) and value > MOST and info.field_name != "seed":
            raise PydanticCustomError("less_than_equal", "Input should be less than or equal to {most}", {"most": MOST})
        return value
