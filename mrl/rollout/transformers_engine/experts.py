"""Which experts the layers of a transformers model send tokens to, noted while it generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mrl.rollout.transformers_engine.sampling import Job


class ExpertTap:
    """Open (a context), it notes what the modules `...experts` of a model are told, layer by layer: (hidden states,
    experts [tokens, experts a token], their weights)."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for name, module in model.named_modules() if name.endswith(".experts")]
        self._seen: list[list[Tensor]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> ExpertTap:
        self._seen = [[] for _ in self._layers]
        for seen, layer in zip(self._seen, self._layers):
            self._hooks.append(layer.register_forward_pre_hook(lambda _, told, seen=seen: seen.append(told[1])))
        return self

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def give(self, jobs: Sequence[Job], width: int) -> None:
        """To the jobs of the batch that has been generated, whose prompts were padded on the left to `width` tokens; a
        job's last token has gone nowhere."""
        rows = len(jobs)
        layers = [torch.cat([part.view(rows, -1, part.size(-1)) for part in seen], 1).cpu() for seen in self._seen]
        every = torch.stack(layers, 2)  # [rows, width + tokens drawn - 1, layers, experts a token]
        self._seen = []
        for job, own in zip(jobs, every):
            first = width - len(job.prompt)
            if job.asks:
                job.experts = own[first : width + len(job.log_probs) - 1]
