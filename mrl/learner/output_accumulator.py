"""Model outputs of the last backward pass, kept on the device until they are read."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mrl import platform
from mrl.core import Rollout
from mrl.parallel import Mesh


class OutputAccumulator:
    """Outputs [k, r] of response tokens, accumulated over micro-batches.

    Every query is collective over the world, refers to the rollout of the last pass, and returns the same on every
    rank.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._is_told = mesh.tp_rank == 0  # tensor-parallel ranks have equal outputs: count them once
        self._parts: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        """Discards the outputs of the previous pass."""
        self._parts = []

    def add(self, outputs: Tensor, dest: Tensor) -> None:
        """Adds outputs [k, r] for the rollout's response tokens at `dest` [r]."""
        self._parts.append((outputs.detach(), dest))

    def log_probs(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Returns (log-probs [R], 0 where none was computed; [R] bool, True where one was)."""
        found = self.outputs(rollout, 1)
        return found[0], found[1].bool()

    def outputs(self, rollout: Rollout, channels: int) -> Tensor:
        """Returns [channels + 1, R]: the first `channels` outputs, 0 where none was computed; then 1 where one was."""
        found = torch.zeros(channels + 1, rollout.num_response_tokens, device=platform.device())
        if self._is_told:
            for values, dest in self._parts:
                found[:channels, dest], found[channels, dest] = values[:channels], 1.0
        dist.all_reduce(found)
        return found.cpu()

    def nonfinite_samples(self, rollout: Rollout) -> list[int]:
        """Returns the samples with a non-finite output at any token."""
        bad = torch.zeros(rollout.num_response_tokens, device=platform.device())
        for values, dest in self._parts:
            bad[dest] = (~values.isfinite().all(0)).float()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return rollout.dense(bad.cpu()).any(1).nonzero().flatten().tolist()
