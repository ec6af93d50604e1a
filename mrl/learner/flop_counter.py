"""Count of the floating-point operations of one model's passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrl.core import Rollout
from mrl.data.image_positions import image_positions
from mrl.families import ModelArch
from mrl.families.flops import ForwardFlops, TowerFlops
from mrl.families.table import Role


class FlopCounter:
    """`total`: operations of all passes so far, over all ranks, without recomputed activations."""

    def __init__(self, arch: ModelArch, role: Role, *, trains_tower: bool) -> None:
        self.total = 0
        self._body, self._tower = ForwardFlops.of(arch, role), TowerFlops.of(arch)
        self._trains_tower = trains_tower

    def add(self, rollout: Rollout, sample_ids: Sequence[int], passes: int) -> None:
        """Adds `passes` passes over these samples; a frozen vision tower has no backward passes."""
        rollout, ids = rollout.split_sequences(list(sample_ids))
        lens, outputs = rollout.seq_lens[ids], int(rollout.response_lens[ids].sum())
        self.total += passes * self._body.total(int(lens.sum()), int((lens * (lens + 1) // 2).sum()), outputs)
        if self._tower is not None:  # each image counts once, even if several samples or micro-batches contain it
            images = image_positions(rollout.pick(torch.tensor(ids)), self._tower.vision).images
            seen = sum(self._tower.picture(patches) for patches in images[:, 2:4].prod(1).tolist())
            self.total += (passes if self._trains_tower else 1) * seen
