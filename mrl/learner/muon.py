"""Muon (Jordan et al., 2024; Liu et al., 2025, arXiv 2502.16982): momentum that is orthogonalized matrix by matrix.

It runs inside Megatron's distributed optimizer, before Adam updates the other parameters. torch.optim.Muon and
emerging_optimizers want whole matrices as parameters, and the distributed optimizer has ranges of flattened ones.
Megatron-Core 0.19's layer-wise optimizer keeps matrices whole, but its checkpoints do not load with another number of
data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor, nn

from mrl.config.schema import MuonConfig
from mrl.families import ModelArch
from mrl.families.rows import ParameterMapping
from mrl.families.table import VALUE_HEAD, Role, weight_table
from mrl.parallel import Mesh
from mrl.weights.model.names import named_parameters
from mrl.weights.parameter_layout import TRANSFORMED, to_hf, to_megatron

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: steepest at 0, and singular values end within 0.7 to 1.2
EPS = 1e-7  # smallest norm of a matrix that is scaled to 1


class Muon:
    """Updates the matrices of one model in each step of `optimizer`; embedding, output layer, value head and vectors
    are left to Adam.

    A matrix is a tensor of the Hugging Face files (q, k and v are three), so the update does not depend on the layout.
    Each data-parallel rank computes the matrices of which it has a range, each tensor-parallel rank those that it has a
    part of. The momentum takes the place of Adam's mean (`exp_avg`), and `exp_avg_sq` stays zero.
    """

    def __init__(
        self,
        cfg: MuonConfig,
        optimizer: ChainedOptimizer,
        chunks: Sequence[nn.Module],
        arch: ModelArch,
        role: Role,
        mesh: Mesh,
    ) -> None:
        self._cfg, self._arch, self._mesh = cfg, arch, mesh
        table = weight_table(arch, role)
        self._rows = {
            parameter: table[name] for name, parameter in named_parameters(chunks) if _is_matrix(name, table[name])
        }
        for part in optimizer.chained_optimizers:
            part.optimizer.register_step_pre_hook(partial(self._update, part))

    @torch.no_grad()
    def _update(self, part: Any, *_: Any) -> None:
        """Updates the matrices of a part of the optimizer, whose Adam then skips them: they have no gradient."""
        cfg, groups, owned = self._cfg, part.optimizer.param_groups, []
        for parameter, (number, place) in part.model_param_group_index_map.items():
            if parameter not in self._rows:
                continue
            main, own = groups[number]["params"][place], part._get_model_param_range_map(parameter)["param"]
            gradient, state = parameter.main_grad.view(-1)[own.start : own.end], part.optimizer.state[main]
            momentum = state["exp_avg"].lerp_(gradient, 1 - cfg.momentum)
            gradient.copy_(gradient.lerp(momentum, cfg.momentum) if cfg.nesterov else momentum)
            if "step" in state:
                state["step"] += 1  # torch's Adam counts by parameter, and Megatron wants equal counts
            main.grad = None
            owned.append((parameter, main, own, groups[number]))
        self._gather(part)
        for parameter, main, own, group in owned:
            update = self._orthogonalized(self._rows[parameter], parameter.main_grad, parameter.dtype)
            rate = group["lr"] * cfg.lr_factor
            main.mul_(1 - rate * group["weight_decay"])
            main.add_(update.reshape(-1)[own.start : own.end], alpha=-rate)

    def _gather(self, part: Any) -> None:
        """Gathers the matrices over data parallelism, in the gradient buffers, whose gradients are no longer needed."""
        for buffer in part.buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets if group.size() > 1 else ():
                if any(parameter in self._rows for parameter in bucket.params):
                    own = bucket.grad_data.chunk(group.size())[group.rank()]
                    dist.all_gather_into_tensor(bucket.grad_data, own, group=group)

    def _orthogonalized(self, row: ParameterMapping, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns this rank's shard of the scaled update, float32."""
        mesh, (tp, tp_rank) = self._mesh, self._mesh.tensor_cut(row.expert)
        shards = [shard]
        if row.tp_dim is not None and tp > 1:
            shards = [torch.empty_like(shard) for _ in range(tp)]
            dist.all_gather(shards, shard.contiguous(), group=mesh.expert_tp_group if row.expert else mesh.tp_group)
        updates = []
        for matrix in to_hf(row, shards, self._arch):
            rows, columns = matrix.shape[::-1] if row.kind in TRANSFORMED else matrix.shape  # outputs, inputs
            scale = 0.2 * max(rows, columns) ** 0.5 if self._cfg.scale == "adam" else max(1.0, rows / columns) ** 0.5
            updates.append(scale * orthogonalized(matrix, self._cfg.iterations, dtype))
        return to_megatron(row, updates, self._arch, tp, tp_rank)


def _is_matrix(name: str, row: ParameterMapping) -> bool:
    return row.kind != "vocab" and name != VALUE_HEAD and not row.frozen and len(row.shapes[0]) == 2


def orthogonalized(matrix: Tensor, iterations: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns `matrix` [rows, columns] with all singular values near 1, in its own dtype, by Newton-Schulz iterations.

    dtype: of the products
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x = (matrix / matrix.norm().clamp(min=EPS)).to(dtype)
    x = x.t() if is_tall else x
    for _ in range(iterations):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.t() if is_tall else x).to(matrix.dtype)
