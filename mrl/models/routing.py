"""Which experts the routers of a model choose: noted on the way, or given to them (routing replay, arXiv 2510.11370).

Given experts replace a router's choice and nothing else: how much each of them counts still comes of the router's
scores, through which its gradient flows. What is given travels with a batch, as its positions do, and each layer takes
it from there when it is called: so it is the right one in a pipeline's order, and when activations are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mrl.families import ModelArch
from mrl.models.mcore import RouterReplay, RouterReplayAction, TopKRouter, TransformerLayer


@dataclass(frozen=True)
class Routing:
    """Of a micro-batch of t local tokens of a model with L layers that have experts, k a token.

    given [t, L, k] uint8 or int16: the experts, all different ones; None: routers choose, and it is noted
    counts [t] bool: tokens of which it is counted how many of them the routers would not have chosen
    changed [2] int64: so many, of how many; added to
    source [t] int64: places of the tokens in `noted`, -1: padding
    noted [N + 1, L, k]: what routers chose, of all tokens of a rollout; the last row is nobody's
    """

    given: Tensor | None
    counts: Tensor
    changed: Tensor
    source: Tensor
    noted: Tensor | None = None


class RouterChoice(RouterReplay):
    """What one router does with the tokens of the layer call that it is in. Megatron's own, but in no list of all
    routers of the process, which would mix models."""

    def __init__(self) -> None:
        super().__init__()
        RouterReplay.global_router_replay_instances.pop()
        self._changed: Tensor | None = None
        self._counts: Tensor | None = None

    def begin(self, routing: Routing, layer: int, part: slice) -> None:
        """layer: its number among those with experts; part: the local tokens that this rank's router sees."""
        if routing.given is None:
            return self.set_router_replay_action(RouterReplayAction.RECORD)
        self.target_topk_idx = routing.given[part, layer].long()  # not set_target_indices, which keeps it for ever
        self._counts, self._changed = routing.counts[part], routing.changed
        self.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def end(self, routing: Routing, layer: int, part: slice) -> None:
        """Notes what was chosen, and forgets."""
        if routing.noted is not None and self.recorded_topk_idx is not None:
            routing.noted[routing.source[part], layer] = self.recorded_topk_idx.to(routing.noted.dtype)
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
        """(scores, experts), [tokens, topk] each."""
        if self._changed is not None:
            assert default_compute_topk is not None and self._counts is not None and self.target_topk_idx is not None
            _, own = default_compute_topk(scores.detach(), topk, num_groups, group_topk)
            differ = ~(self.target_topk_idx[:, :, None] == own[:, None]).any(-1)
            self._changed += torch.stack([(differ & self._counts[:, None]).sum(), self._counts.sum() * topk])
        return super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)


def let_choose(chunks: Iterable[nn.Module], arch: ModelArch) -> None:
    """From now on the routers of these chunks do what `ModelBatch.routing` says."""
    places = {number: i for i, number in enumerate(n for n, layer in enumerate(arch.layers, 1) if layer.experts)}
    for chunk in chunks:
        for layer in chunk.modules():
            if isinstance(layer, TransformerLayer) and layer.layer_number in places:
                _follow(layer, places[layer.layer_number])


def _follow(layer: TransformerLayer, place: int) -> None:
    (router,) = (module for module in layer.modules() if isinstance(module, TopKRouter))
    router.router_replay = choice = RouterChoice()
    group, shares = layer.pg_collection.tp, layer.config.sequence_parallel

    def part(routing: Routing) -> slice:
        tokens = len(routing.source) // group.size()
        return slice(group.rank() * tokens, (group.rank() + 1) * tokens) if shares else slice(None)

    def begin(_: nn.Module, args: Any, given: Mapping[str, Any]) -> None:
        if (routing := given["packed_seq_params"].routing) is not None:
            choice.begin(routing, place, part(routing))

    def end(_: nn.Module, args: Any, given: Mapping[str, Any], output: Any) -> None:
        if (routing := given["packed_seq_params"].routing) is not None:
            choice.end(routing, place, part(routing))

    layer.register_forward_pre_hook(begin, with_kwargs=True)
    layer.register_forward_hook(end, with_kwargs=True)


def given_experts(experts: Tensor, source: Tensor) -> Tensor:
    """[t, L, k], of a rollout's experts [N, L, k] those of the tokens at `source` [t]; padding, which is at -1, goes to
    the first k."""
    found = experts[source.clamp(min=0)]
    return torch.where((source < 0)[:, None, None], torch.arange(experts.size(-1), dtype=experts.dtype), found)
