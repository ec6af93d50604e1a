"""Base class and types of all sections, from mrl.options."""

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
