"""Parameters of model chunks by their global Megatron name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from mrl.models.naming import global_name, unwrap


def named_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """(global name, parameter) of everything that this rank holds, chunk after chunk; chunks may be wrapped."""
    for chunk in chunks:
        model = unwrap(chunk)
        for name, parameter in model.named_parameters():
            yield global_name(model, name), parameter
