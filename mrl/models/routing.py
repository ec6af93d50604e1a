"""Expert routing of a model: recorded, or replayed (routing replay, arXiv 2510.11370).

Replayed experts replace a router's choice and nothing else: their weights still come from the router's scores, through
which its gradient flows. The routing travels with a batch, as its positions do, and each layer reads it when called, so
it is right in a pipeline's order and when activations are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mrl.families import ModelArch
from mrl.models.mcore import RouterReplay, RouterReplayAction, TopKRouter, TransformerLayer


@dataclass(frozen=True)
class Routing:
    """Routing of a micro-batch of t local tokens; L MoE layers of this rank's stage, k experts a token.

    replayed [t, L, k] uint8 or int16: the experts, all distinct; None: routers choose, and the choice is recorded
    counts [t] bool: tokens counted in `changed`
    changed [2] int64, accumulated: replayed choices that the routers would not have made, and all replayed choices
    source [t] int64: indices of the tokens in `recorded`
    recorded [T + 1, L, k]: the routers' choices for all T local tokens of a pass; the last row is for padding
    """

    replayed: Tensor | None
    counts: Tensor
    changed: Tensor
    source: Tensor | None = None
    recorded: Tensor | None = None


class RecordingRouterReplay(RouterReplay):
    """Recording or replay in one router during a layer call.

    Megatron's own, but outside its global list of routers, which would mix models.
    """

    def __init__(self) -> None:
        super().__init__()
        RouterReplay.global_router_replay_instances.pop()
        self._changed: Tensor | None = None
        self._counts: Tensor | None = None

    def begin(self, routing: Routing, layer: int, part: slice) -> None:
        """Starts recording or replay. layer: index among the stage's MoE layers; part: the local tokens that this
        rank's router sees.
        """
        if routing.replayed is None:
            return self.set_router_replay_action(RouterReplayAction.RECORD)
        self.target_topk_idx = routing.replayed[part, layer].long()  # not set_target_indices, which keeps it for ever
        self._counts, self._changed = routing.counts[part], routing.changed
        self.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def end(self, routing: Routing, layer: int, part: slice) -> None:
        """Records the router's choice and clears the state."""
        if routing.recorded is not None and routing.source is not None and self.recorded_topk_idx is not None:
            routing.recorded[routing.source[part], layer] = self.recorded_topk_idx.to(routing.recorded.dtype)
        self.clear_indices()
        self.clear_router_replay_action()
        self._counts = self._changed = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns (scores, experts), [tokens, topk] each."""
        if self._changed is not None:
            assert default_compute_topk is not None and self._counts is not None and self.target_topk_idx is not None
            _, own = default_compute_topk(scores.detach(), topk, num_groups, group_topk)
            differ = ~(self.target_topk_idx[:, :, None] == own[:, None]).any(-1)
            self._changed += torch.stack([(differ & self._counts[:, None]).sum(), self._counts.sum() * topk])
        return super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)


def attach_routing_replay(chunks: Iterable[nn.Module], arch: ModelArch) -> list[int]:
    """Makes the routers of these chunks follow `ModelBatch.routing`; returns the indices of their layers among the
    model's MoE layers.
    """
    numbers = [number for number, layer in enumerate(arch.layers, 1) if layer.experts]
    found: list[int] = []
    for chunk in chunks:
        for layer in chunk.modules():
            if isinstance(layer, TransformerLayer) and layer.layer_number in numbers:
                _follow(layer, len(found))
                found.append(numbers.index(layer.layer_number))
    return found


def tokens_of_router(count: int, group: dist.ProcessGroup, shares: bool) -> slice:
    """Returns which of `count` local tokens this rank's routers see. shares: tensor-parallel ranks divide them."""
    each = count // group.size()
    return slice(group.rank() * each, (group.rank() + 1) * each) if shares else slice(None)


def _follow(layer: TransformerLayer, place: int) -> None:
    (router,) = (module for module in layer.modules() if isinstance(module, TopKRouter))
    router.router_replay = choice = RecordingRouterReplay()
    group, shares = layer.pg_collection.tp, layer.config.sequence_parallel

    def part(routing: Routing) -> slice:
        return tokens_of_router(len(routing.counts), group, shares)

    def begin(_: nn.Module, args: Any, given: Mapping[str, Any]) -> None:
        if (routing := given["packed_seq_params"].routing) is not None:
            choice.begin(routing, place, part(routing))

    def end(_: nn.Module, args: Any, given: Mapping[str, Any], output: Any) -> None:
        if (routing := given["packed_seq_params"].routing) is not None:
            choice.end(routing, place, part(routing))

    layer.register_forward_pre_hook(begin, with_kwargs=True)
    layer.register_forward_hook(end, with_kwargs=True)
