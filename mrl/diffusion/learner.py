"""Gradient and update of the net, equal for any placement of images on ranks and in micro-batches.

The loss is a sum over rows (a row is one denoising step of one image), divided by one number for the whole update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl import platform
from mrl.config.sections.models import OptimizerConfig
from mrl.diffusion.sharding import fill, is_sharded, local, whole
from mrl.parallel import rank, world_size

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's
BUCKET = 1 << 24  # gradient elements of one all-reduce


class DiffusionLearner:
    """AdamW on the trained float32 weights of a net, whole on every rank or sharded.

    parameters: trained weights of this rank; updates: number of applied updates, without skipped ones
    """

    def __init__(self, net: torch.nn.Module, cfg: OptimizerConfig) -> None:
        self._cfg, self.updates, self.is_sharded = cfg, 0, is_sharded(net)
        self._named = {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}
        self.parameters = list(self._named.values())
        betas = (cfg.beta1, cfg.beta2)
        self._adam = torch.optim.AdamW(self.parameters, cfg.lr, betas, cfg.eps, weight_decay=cfg.weight_decay)

    def accumulate(self, losses: Iterable[Tensor]) -> Tensor:
        """Adds the gradient of each micro-batch's loss, a share of the update's; returns this rank's sum of losses."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        total = torch.zeros((), device=self.parameters[0].device)
        for loss in losses:
            loss.backward()
            total += loss.detach()
        return total

    def step(self, sums: Sequence[Tensor]) -> tuple[list[float], dict[str, float]]:
        """Sums gradients over ranks and updates, unless a value is not finite. Collective.

        sums: scalars of this rank, the loss first. Returns them summed over ranks, and metrics grad_norm, lr, skipped.
        """
        gradients = [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        if world_size() > 1 and not self.is_sharded:
            for bucket in _buckets(gradients):
                _sum_over_ranks(bucket)
        squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        totals = torch.stack([total.double() for total in (*sums, squares)])
        if not self.is_sharded:
            totals[-1] /= world_size()  # every rank has the whole sum
        if world_size() > 1:
            dist.all_reduce(totals)
        *found, square = totals.tolist()
        norm = math.sqrt(square)
        skipped = not (math.isfinite(norm) and math.isfinite(found[0]))
        rate = self._cfg.learning_rate(self.updates + 1)
        if not skipped:
            self._update(gradients, norm, rate)
        return found, {"loss": found[0], "grad_norm": norm, "lr": rate, "skipped": float(skipped)}

    def _update(self, gradients: list[Tensor], norm: float, rate: float) -> None:
        if norm > self._cfg.clip_grad:
            torch._foreach_mul_(gradients, self._cfg.clip_grad / norm)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of weights, Adam's moments and the count in host memory on rank 0, {} on other ranks.
        Collective."""
        found: dict[str, Any] = {"weights": {}, **{moment: {} for moment in MOMENTS}}
        for name, parameter in self._named.items():
            moments = self._adam.state.get(parameter, {})
            for kind, value in {"weights": parameter, **{key: moments[key] for key in MOMENTS if moments}}.items():
                if self.is_sharded or rank() == 0:
                    kept = whole(value)
                    if rank() == 0:
                        found[kind][name] = kept
        return {**found, "updates": self.updates} if rank() == 0 else {}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError for the weights of another net or of other adapters."""
        shapes = {name: tuple(value.shape) for name, value in state["weights"].items()}
        if shapes != {name: tuple(parameter.shape) for name, parameter in self._named.items()}:
            raise ValueError(
                "names or shapes of the checkpoint's trained weights differ: set model.path and actor.lora as in the "
                "checkpoint's run"
            )

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Loads rank 0's state into every rank's weights and moments. Collective; None on the other ranks."""
        counts = torch.zeros(2, dtype=torch.int64, device=platform.device())
        if state is not None:
            counts[0], counts[1] = state["updates"], len(state[MOMENTS[0]])
        if world_size() > 1:
            dist.broadcast(counts, 0)
        self.updates, moments = counts.tolist()
        for name, parameter in self._named.items():
            fill(parameter, state["weights"][name] if state is not None else None)
            if not moments:
                continue
            own = self._adam.state[parameter] = {key: torch.zeros_like(parameter) for key in MOMENTS}
            for key, value in own.items():
                fill(value, state[key][name] if state is not None else None)
            own["step"] = torch.tensor(float(self.updates))

    def share(self) -> None:
        """Broadcasts rank 0's weights; a sharded net needs no broadcast. Collective."""
        if not self.is_sharded:
            for parameter in self.parameters:
                fill(parameter, parameter)


def _buckets(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(each.numel() for each in bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _sum_over_ranks(tensors: list[Tensor]) -> None:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))
