"""Units of a batch's tensors: every field declares its unit once, and slicing and joining of batches follow from it.

A batch is a dataclass. `tokens: PerToken` declares a tensor whose first dimension counts tokens, and `rows: PerSample |
None` an optional one. The number of items that each sample has of a unit is an attribute of the batch, which the unit
names: a new kind of item (turns, say) is one more `Unit`. A field may itself be a batch of the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Unit:
    """Meaning of a tensor's first dimension. lengths: attribute [B] int64 of the batch with the items per sample; None:
    one."""

    name: str
    lengths: str | None = None

    def count(self, of: Any) -> int:
        """Returns the number of items in the batch `of`. Raises ValueError if the batch has no lengths for them."""
        return of.num_samples if self.lengths is None else int(self._each(of).sum())

    def places(self, of: Any, samples: Tensor) -> Tensor:
        """Returns [m] int64: indices of the items of `samples` [b] int64 in a tensor of the batch `of`, in that order.

        Raises ValueError like `count`.
        """
        if self.lengths is None:
            return samples
        each = self._each(of)
        count = each[samples]
        return torch.arange(int(count.sum())) + (starts(each)[samples] - starts(count)).repeat_interleave(count)

    def span(self, of: Any, samples: range) -> slice:
        """Returns the slice of the items of consecutive samples."""
        if self.lengths is None:
            return slice(samples.start, samples.stop)
        each = self._each(of)
        start = int(each[: samples.start].sum())
        return slice(start, start + int(each[samples.start : samples.stop].sum()))

    def _each(self, of: Any) -> Tensor:
        assert self.lengths is not None
        lengths = getattr(of, self.lengths)
        if lengths is None:
            raise ValueError(f"{self.lengths} is None: the number of {self.name}s of each sample is unknown")
        return lengths


SAMPLE = Unit("sample")
TOKEN = Unit("token", "seq_lens")
RESPONSE_TOKEN = Unit("response token", "response_lens")
IMAGE = Unit("image", "image_counts")
SEQUENCE = Unit("sequence", "sequence_counts")
NUMBERING = "the values number things of this batch alone: `join` gives those of each batch other numbers"

PerSample = Annotated[Tensor, SAMPLE]
PerToken = Annotated[Tensor, TOKEN]
PerResponseToken = Annotated[Tensor, RESPONSE_TOKEN]
PerImage = Annotated[Tensor, IMAGE]
PerSequence = Annotated[Tensor, SEQUENCE]


def starts(counts: Tensor) -> Tensor:
    """Returns the start of each consecutive block with these counts."""
    return counts.cumsum(0) - counts


def check(batch: object, of: object = None) -> None:
    """Raises ValueError for a tensor whose first dimension does not match its unit, TypeError for a declared tensor
    that is
    none. of: the batch that has the lengths, by default this one."""
    kind, of = type(batch).__name__, batch if of is None else of
    for name, (unit, *_) in declared(batch).items():
        value = getattr(batch, name)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{kind}.{name} must be a tensor, got {type(value).__name__}")
        if value.shape[:1] != (count := unit.count(of),):
            raise ValueError(f"{kind}.{name} has shape {list(value.shape)}, but there are {count} {unit.name}s")


def pick(batch: T, samples: Tensor, of: object = None) -> T:
    """Returns some samples in the order of `samples` [b] int64, which may repeat. of: as in `check`"""
    of = batch if of is None else of
    return _taken(batch, lambda unit: unit.places(of, samples))


def part(batch: T, samples: range, of: object = None) -> T:
    """Returns consecutive samples (step 1) like `pick`; the tensors are views of the batch's."""
    of = batch if of is None else of
    return _taken(batch, lambda unit: unit.span(of, samples))


def _taken(batch: Any, where: Callable[[Unit], Tensor | slice]) -> Any:
    units, changes = declared(batch), {}
    for name, value in _values(batch).items():
        if _is_batch(value):
            changes[name] = _taken(value, where)
        elif name in units and value is not None:
            changes[name] = value[where(units[name][0])]
    return replace(batch, **changes)


def join(batches: Sequence[T]) -> T:
    """Returns the samples of all batches in order; fields without a unit are the first batch's.

    Raises ValueError for a field that only some batches have, TypeError for batches of several types.
    """
    first: Any = batches[0]
    if len(kinds := {type(batch).__name__ for batch in batches}) > 1:
        raise TypeError(f"cannot join batches of different types: {', '.join(sorted(kinds))}")
    units, changes = declared(first), {}
    for name in _values(first):
        values = [_values(batch)[name] for batch in batches]
        inner, have = any(map(_is_batch, values)), [value is not None for value in values]
        if not any(have) or (name not in units and not inner):
            continue
        if not all(have):
            raise ValueError(f"{type(first).__name__}.{name}: some of the batches to join have it, others do not")
        numbers = not inner and NUMBERING in units[name]
        changes[name] = join(values) if inner else torch.cat(_numbered_on(values) if numbers else values)
    return replace(first, **changes)


def declared(batch: Any) -> Mapping[str, tuple[Any, ...]]:
    """Returns, by name, the unit and further declarations of each tensor field of a batch or its class.

    Raises TypeError for a tensor without a unit.
    """
    kind: Any = batch if isinstance(batch, type) else type(batch)
    return _declared(kind)


@cache
def _declared(kind: Any) -> Mapping[str, tuple[Any, ...]]:
    hints, found = get_type_hints(kind, include_extras=True), {}
    for name in (field.name for field in fields(kind)):
        tensors = [part for part in (hints[name], *get_args(hints[name])) if _is_tensor(part)]
        if not tensors:
            continue
        marks: tuple[Any, ...] = getattr(tensors[0], "__metadata__", ())
        if not marks or not isinstance(marks[0], Unit):
            raise TypeError(f"{kind.__name__}.{name} is a tensor without a declared unit of its items")
        found[name] = marks
    return found


def _values(batch: Any) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in fields(batch)}


def _is_tensor(hint: Any) -> bool:
    return hint is Tensor or (get_origin(hint) is Annotated and hint.__origin__ is Tensor)


def _is_batch(value: object) -> bool:
    if not is_dataclass(value) or isinstance(value, type):
        return False
    return bool(declared(value)) or any(map(_is_batch, _values(value).values()))


def _numbered_on(values: Sequence[Tensor]) -> list[Tensor]:
    """Renumbers each tensor from 0 upwards to follow the numbers of those before it."""
    counts = torch.tensor([0, *(int(value.max()) + 1 for value in values[:-1])])
    return [value + before for value, before in zip(values, counts.cumsum(0), strict=True)]
