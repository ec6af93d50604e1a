"""Parameters of model chunks by their global Megatron name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from mrl.families.adapters import is_adapter
from mrl.models.naming import global_name, unwrap


def named_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields (global name, parameter) of all weights of the model that this rank holds, chunk after chunk; chunks may
    be wrapped. Adapters are excluded. Parameters have their local (sharded) shapes.
    """
    yield from ((name, parameter) for name, parameter in _all_parameters(chunks) if not is_adapter(name))


def trained_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the same for trainable parameters: in a model with adapters these, and a value head."""
    yield from ((name, parameter) for name, parameter in _all_parameters(chunks) if parameter.requires_grad)


def _all_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for chunk in chunks:
        model = unwrap(chunk)
        for name, parameter in model.named_parameters():
            yield global_name(model, name), parameter
