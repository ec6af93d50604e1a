"""What every section is made of."""

from mrl.options.base import (
    FLOAT32_MAX,
    FLOAT32_TINY,
    MAX_INT,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
)

__all__ = [
    "FLOAT32_MAX",
    "FLOAT32_TINY",
    "MAX_INT",
    "Fraction",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Section",
    "Seed",
]
