"""Base classes and types of all configuration sections and options."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator

from mrl import float32

MAX_INT = 2**31 - 1


def _in_float32(value: float) -> float:
    """Checks that a value is 0 or a normal float32, in which optimizers and losses compute: 1e-50 is 0 there."""
    if value and not float32.TINY <= value <= float32.MAX:
        raise ValueError(f"must be 0 or a float32 between {float32.TINY:.2g} and {float32.MAX:.2g}")
    return value


def _address(url: str) -> str:
    """Checks that a request can be sent to the URL."""
    try:
        parts = urlsplit(url)
        host, _ = (parts.hostname or "").encode("idna"), parts.port  # ValueError where they are none
    except ValueError:
        host = b""
    if not host or parts.scheme not in ("http", "https"):
        raise ValueError(f"{url!r} is not an address such as http://host:8000")
    return url


def _at_home(path: str) -> str:
    """Expands `~` and `~user` like a shell."""
    found = os.path.expanduser(path)
    if found.startswith("~"):
        user = path.partition("/")[0]
        raise ValueError(f"{user} is not a home directory here: write ./{user} for a folder of that name")
    return found


def _of_a_function(value: Any) -> float | str | bool:
    """Checks a function's option and returns it unchanged: 3 stays an integer, since functions may count with it."""
    if isinstance(value, str | bool) or (isinstance(value, int | float) and math.isfinite(value)):
        return value
    raise ValueError("must be a finite number, a string, true or false")


PositiveInt = Annotated[int, Field(gt=0, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0), AfterValidator(_in_float32)]
NonNegativeFloat = Annotated[float, Field(ge=0), AfterValidator(_in_float32)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
InnerFraction = Annotated[float, Field(gt=0, lt=1)]
FilePath = Annotated[str, AfterValidator(_at_home)]
Url = Annotated[str, AfterValidator(_address)]
OptionValue = Annotated[Any, PlainValidator(_of_a_function), Field(description="number or string or true | false")]
CustomOptions = dict[str, OptionValue]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    gone: ClassVar[Mapping[str, str]] = {}  # former keys -> what to write instead

    @classmethod
    def present_names(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the section of an older checkpoint in the present keys."""
        return dict(given)


class Options(Section):
    """Options of one algorithm alone, a class each; `class Mine(LossOptions, name="mine")` registers it."""

    registry: ClassVar[dict[str, Any]]  # name -> class, of the algorithms of one kind
    renamed: ClassVar[Mapping[str, str]] = {}  # former names of keys -> their names
    implied_by: ClassVar[str | None] = None  # the key that selects this algorithm if nothing else is selected

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            cls.registry[name] = cls

    @classmethod
    def present_names(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `given` with former names replaced by current ones. Raises ValueError for a key under both names."""
        for old, new in cls.renamed.items():
            if old in given and new in given:
                raise ValueError(f"{old} is the former name of {new}: give only {new}")
        return {cls.renamed.get(key, key): value for key, value in given.items()}

    @classmethod
    def filled(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns every option, as given or by default. Raises TypeError for an unknown key; the algorithm checks
        bounds."""
        given = cls.present_names(given)
        fields = cls.model_fields
        if unknown := sorted(given.keys() - fields.keys()):
            raise TypeError(f"unknown option {', '.join(unknown)}: available: {', '.join(fields) or 'none'}")
        return {name: given.get(name, field.get_default()) for name, field in fields.items()}
