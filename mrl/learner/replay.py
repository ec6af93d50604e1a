"""Expert routing replay of a mixture-of-experts learner, and the share of replayed choices its routers would not
make.

The experts of a step's tokens are large: layers x experts a token x 1 or 2 bytes for each token. Rank 0 alone has all
of them (`Rollout.routed_experts`). Before a pass every rank receives its share: the tokens of its micro-batches, in the
layers of its pipeline stage. Of tensor-parallel ranks, which share tokens and layers, the first one receives it, and
the others receive each micro-batch from that one when it is computed.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mrl import platform
from mrl.core import Rollout
from mrl.families import ModelArch
from mrl.learner.micro_batches import MicroBatch
from mrl.models.mcore import MegatronModule
from mrl.models.routing import Routing, attach_routing_replay, tokens_of_router
from mrl.parallel import Mesh, rank, world_size

PIECE = 1 << 16  # tokens sent at once: rank 0 copies no more


class RoutingReplay:
    """Applies the expert routing that a rollout carries; the routers choose for a rollout without one.

    Construction is collective over the world.
    """

    def __init__(self, chunks: Sequence[MegatronModule], arch: ModelArch, mesh: Mesh) -> None:
        assert arch.experts is not None
        self._mesh, self._per_token = mesh, arch.experts.per_token
        self._all_layers = sum(layer.experts for layer in arch.layers)
        self._dtype = {"uint8": torch.uint8, "int16": torch.int16}[arch.experts.number]
        self._changed = torch.zeros(2, dtype=torch.int64, device=platform.device())
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=mesh.timeout_s))
        self._layers: list[list[int]] = [[]] * world_size()  # of every rank's stage, among the MoE layers
        dist.all_gather_object(self._layers, attach_routing_replay(chunks, arch), group=self._group)
        self._records = False
        # of a pass: each local token's index in its rollout, -1: padding; whether this rank records the token
        self._sources, self._mine = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
        self.share: Tensor | None = None  # of a pass: [local tokens, layers of the stage, experts a token]
        self._recorded: Tensor | None = None

    def begin(self, batches: Sequence[MicroBatch], rollouts: Sequence[Rollout]) -> list[MicroBatch]:
        """Returns the micro-batches of a pass, once this rank has its share of the experts that the rollouts carry.
        `rollouts`: by term; the micro-batches are in the order of their terms. Collective.
        """
        lengths, terms = [len(batch.packed.source) for batch in batches], [batch.term for batch in batches]
        firsts = list(itertools.accumulate(lengths, initial=0))
        self._sources = torch.cat([batch.packed.source for batch in batches])
        if any(rollout.routed_experts is not None for rollout in rollouts):
            self.share = self._rows(len(self._sources) if self._mesh.tp_rank == 0 else 0)
        for term, rollout in enumerate(rollouts):
            if rollout.routed_experts is not None and self.share is not None:
                span = slice(firsts[bisect_left(terms, term)], firsts[bisect_right(terms, term)])
                ids = self._sources[span].clamp(min=0) if self._mesh.tp_rank == 0 else self._sources[:0]
                self._move(rollout.routed_experts, ids, self.share[span], to_main=False)
        if self.share is not None and self._mesh.tp_rank == 0:
            self.share[self._sources < 0] = torch.arange(self._per_token, dtype=self._dtype)
        if self._records:
            self._recorded = self._rows(len(self._sources) + 1).to(platform.device())
            self._mine = torch.zeros(len(self._sources), dtype=torch.bool)
            for first, length in zip(firsts, lengths, strict=False):
                own = tokens_of_router(length, self._mesh.tp_group, self._mesh.cfg.sequence)
                self._mine[first : first + length][own] = self._mesh.cfg.sequence or self._mesh.tp_rank == 0
            self._mine &= self._sources >= 0
        return [replace(batch, first=first) for batch, first in zip(batches, firsts, strict=False)]

    def end(self) -> None:
        """Frees the share after a pass."""
        self.share = None

    def routing(self, batch: MicroBatch, rollout: Rollout) -> Routing | None:
        """Returns the routing of a micro-batch on this rank's device; None if nothing is replayed or recorded.

        Collective over the tensor-parallel ranks.
        """
        if rollout.routed_experts is None and not self._records:
            return None
        source, device = batch.packed.source, platform.device()
        span = slice(batch.first, batch.first + len(source))
        is_last = torch.zeros(len(rollout.tokens), dtype=torch.bool)
        lens = rollout.seq_lens if rollout.sequence_lens is None else rollout.sequence_lens
        is_last[lens.cumsum(0) - 1] = True
        counts = (source >= 0) & ~is_last[source.clamp(min=0)]
        if rollout.routed_experts is None:
            places = torch.where(source >= 0, torch.arange(span.start, span.stop), len(self._sources))
            counts, places = platform.to_device([counts, places], device)
            return Routing(None, counts, self._changed, places, self._recorded)
        assert self.share is not None, "received by begin()"
        rows = self.share[span] if self._mesh.tp_rank == 0 else self._rows(len(source))
        counts, rows = platform.to_device([counts, rows], device)
        if self._mesh.tp > 1 and rows.numel():
            dist.broadcast(rows.view(torch.uint8), group=self._mesh.tp_group, group_src=0)
        return Routing(rows, counts, self._changed)

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
        """Returns the recorded choices as `Rollout.routed_experts` has them: [N, MoE layers, experts per token] uint8
        or int16 on rank 0, without layers on the other ranks. Collective.
        """
        assert self._recorded is not None, "a pass was recorded"
        rows, self._recorded = self._recorded[:-1].cpu(), None
        layers = self._all_layers if rank() == 0 else 0
        whole = torch.zeros(len(rollout.tokens), layers, self._per_token, dtype=self._dtype)
        self._move(whole, self._sources[self._mine], rows[self._mine], to_main=True)
        return whole

    def _rows(self, tokens: int) -> Tensor:
        return torch.zeros(tokens, len(self._layers[rank()]), self._per_token, dtype=self._dtype)

    def _move(self, whole: Tensor, ids: Tensor, rows: Tensor, *, to_main: bool) -> None:
        """Copies the experts of tokens `ids` [n] between rank 0's `whole` [N, MoE layers, k] and each rank's `rows`
        [n, layers of its stage, k]. Collective.
        """
        if not self._layers[rank()]:
            ids, rows = ids[:0], rows[:0]
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
        dist.all_gather(counts, torch.tensor([len(ids)]), group=self._group)
        if rank() != 0:
            for piece, values in zip(ids.split(PIECE), rows.split(PIECE), strict=True):
                if len(piece):
                    dist.send(piece, 0, group=self._group)
                    (dist.send if to_main else dist.recv)(values.view(torch.uint8), 0, group=self._group)
            return
        for other, count in enumerate(map(int, counts)):
            layers = torch.tensor(self._layers[other], dtype=torch.int64)
            for first in range(0, count, PIECE):
                span = slice(first, min(first + PIECE, count))
                if other == 0:
                    piece, values = ids[span], rows[span]
                else:
                    piece = torch.empty(span.stop - span.start, dtype=torch.int64)
                    values = torch.empty(len(piece), len(layers), self._per_token, dtype=self._dtype)
                    dist.recv(piece, other, group=self._group)
                if to_main:
                    if other != 0:
                        dist.recv(values.view(torch.uint8), other, group=self._group)
                    whole[piece[:, None], layers] = values
                else:
                    values.copy_(whole[piece[:, None], layers])
                    if other != 0:
                        dist.send(values.view(torch.uint8), other, group=self._group)

    def take_changed_share(self) -> float | None:
        """Returns the share of replayed choices (a token's expert in a layer) since the last call that this model's
        routers would not have made.

        None if no routing was replayed. Collective.
        """
        dist.all_reduce(self._changed)
        changed, of = self._changed.tolist()
        self._changed.zero_()
        return changed / of if of else None
