"""What every section is made of."""

from mrl.options.base import (
    MAX_INT,
    FilePath,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    Url,
)

__all__ = [
    "MAX_INT",
    "FilePath",
    "Fraction",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Section",
    "Seed",
    "Url",
]
