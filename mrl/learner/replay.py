"""Expert routing replay of a mixture-of-experts learner, and the share of replayed choices its routers would not
make.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrl import platform
from mrl.core import PackedBatch, Rollout
from mrl.families import ModelArch
from mrl.models.mcore import MegatronModule
from mrl.models.routing import Routing, attach_routing_replay, gather_routed_experts
from mrl.parallel import Mesh


class RoutingReplay:
    """Applies the expert routing that a rollout carries; the routers choose for a rollout without one."""

    def __init__(self, chunks: Sequence[MegatronModule], arch: ModelArch, mesh: Mesh) -> None:
        assert arch.experts is not None
        attach_routing_replay(chunks, arch)
        self._mesh = mesh
        self._shape = (sum(layer.experts for layer in arch.layers), arch.experts.per_token)
        self._dtype = {"uint8": torch.uint8, "int16": torch.int16}[arch.experts.number]
        self._changed = torch.zeros(2, dtype=torch.int64, device=platform.device())
        self._records = False
        self._recorded: Tensor | None = None

    def routing(self, rollout: Rollout, packed: PackedBatch) -> Routing | None:
        """Returns the routing of a micro-batch on this rank's device; None if nothing is replayed or recorded."""
        if rollout.routed_experts is None and not self._records:
            return None
        source, device = packed.source, platform.device()
        given = None if rollout.routed_experts is None else gather_routed_experts(rollout.routed_experts, source)
        is_last = torch.zeros(len(rollout.tokens), dtype=torch.bool)
        lens = rollout.seq_lens if rollout.sequence_lens is None else rollout.sequence_lens
        is_last[lens.cumsum(0) - 1] = True
        counts = (source >= 0) & ~is_last[source.clamp(min=0)]
        source, counts = platform.to_device([source, counts], device)
        if given is not None:
            (given,) = platform.to_device([given], device)
            return Routing(given, counts, self._changed, source)
        if self._recorded is None:
            self._recorded = torch.zeros(len(rollout.tokens) + 1, *self._shape, dtype=self._dtype, device=device)
        return Routing(None, counts, self._changed, source, self._recorded)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records the routers' choices of one pass over a rollout without routing; read them with `recorded`
        afterwards.
        """
        self._records, self._recorded = True, None
        try:
            yield
        finally:
            self._records = False

    def recorded(self, rollout: Rollout) -> Tensor:
        """Returns the recorded choices [N, MoE layers, experts per token] uint8 or int16, as `Rollout.routed_experts`.

        Collective.
        """
        found = torch.zeros(len(rollout.tokens), *self._shape, dtype=self._dtype, device=platform.device())
        if self._recorded is not None and (self._mesh.tp_rank == 0 or self._mesh.cfg.sequence):
            found = self._recorded[:-1].contiguous()
        self._recorded = None
        dist.all_reduce(found.view(torch.uint8))  # each byte is nonzero on one rank at most
        return found.cpu()

    def take_changed_share(self) -> float | None:
        """Returns the share of replayed choices (a token's expert in a layer) since the last call that this model's
        routers would not have made.

        None if no routing was replayed. Collective.
        """
        dist.all_reduce(self._changed)
        changed, of = self._changed.tolist()
        self._changed.zero_()
        return changed / of if of else None
