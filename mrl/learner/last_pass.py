"""What a model said during the last backward pass, kept on its device until it is asked for."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mrl import platform
from mrl.core import Rollout
from mrl.parallel import Mesh


class LastPass:
    """Outputs [k, r] of some response tokens, a micro-batch after the other. What is asked for is collective over the
    world, about the rollout of that pass, and the same on every rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._is_told = mesh.tp_rank == 0  # tensor-parallel ranks have the same outputs, which are to be added once
        self._parts: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        """Forgets the pass before."""
        self._parts = []

    def add(self, outputs: Tensor, dest: Tensor) -> None:
        """outputs: [k, r]; dest: [r], which of the rollout's response tokens they are of."""
        self._parts.append((outputs.detach(), dest))

    def log_probs(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """(log-probs [R], 0 elsewhere; where there are some, [R] bool)."""
        found = self.outputs(rollout, 1)
        return found[0], found[1].bool()

    def outputs(self, rollout: Rollout, channels: int) -> Tensor:
        """[channels + 1, R]: the first of what was computed, 0 elsewhere; then 1 where it was."""
        found = torch.zeros(channels + 1, rollout.num_response_tokens, device=platform.device())
        if self._is_told:
            for values, dest in self._parts:
                found[:channels, dest], found[channels, dest] = values[:channels], 1.0
        dist.all_reduce(found)
        return found.cpu()

    def nonfinite_samples(self, rollout: Rollout) -> list[int]:
        """Samples at one of whose tokens an output was not finite."""
        bad = torch.zeros(rollout.num_response_tokens, device=platform.device())
        for values, dest in self._parts:
            bad[dest] = (~values.isfinite().all(0)).float()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return rollout.dense(bad.cpu()).any(1).nonzero().flatten().tolist()
