"""What every section is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mrl import float32

MAX_INT = 2**31 - 1


def _in_float32(value: float) -> float:
    """Optimizers and losses compute in float32, where 1e-50 is 0."""
    if value and not float32.TINY <= value <= float32.MAX:
        raise ValueError(f"must be 0 or a float32 between {float32.TINY:.2g} and {float32.MAX:.2g}")
    return value


PositiveInt = Annotated[int, Field(gt=0, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0), AfterValidator(_in_float32)]
NonNegativeFloat = Annotated[float, Field(ge=0), AfterValidator(_in_float32)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
