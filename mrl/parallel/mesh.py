"""Parallel layout over the world, through megatron.core.parallel_state.

Megatron keeps its process groups in module globals, so a process can hold only one layout at a time. A `Mesh` owns one
complete set of these globals and installs them for the duration of `active()`, so the actor, critic and reference can
each have their own layout over the same ranks.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from mrl import platform
from mrl.config.schema import ParallelConfig

platform.install()
from megatron.core import parallel_state as ps  # noqa: E402
from megatron.core.tensor_parallel import random as tp_random  # noqa: E402

_STATE_NAME = re.compile(r"^_[A-Z][A-Z_]*$|^_global_process_group_list$")


def _snapshot() -> dict[str, Any]:
    return {name: value for name, value in vars(ps).items() if _STATE_NAME.match(name)}


_EMPTY = _snapshot()


class Mesh:
    """Process groups of one layout. Construction is collective over the world: every rank, in the same order.

    Sizes and ranks: tp, pp, cp, dp, ep, etp and tp_rank, pp_rank, ...; `dp` excludes context parallelism.
    `vpp` is the number of model chunks a pipeline stage, or None.
    """

    def __init__(self, cfg: ParallelConfig, timeout_s: float = 600.0, seed: int = 1) -> None:
        self.cfg, self.timeout_s = cfg, timeout_s
        self._outer = _snapshot()
        _restore(_EMPTY)
        try:
            ps.initialize_model_parallel(
                tensor_model_parallel_size=cfg.tensor,
                pipeline_model_parallel_size=cfg.pipeline,
                virtual_pipeline_model_parallel_size=cfg.virtual_pipeline,
                context_parallel_size=cfg.context,
                expert_model_parallel_size=cfg.expert,
                expert_tensor_parallel_size=cfg.expert_tensor_size,
                distributed_timeout_minutes=timeout_s / 60,
            )
            tp_random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
            self._read()
        finally:
            self._inner = _snapshot()
            _restore(self._outer)

    def _read(self) -> None:
        self.tp, self.tp_rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
        self.pp, self.pp_rank = ps.get_pipeline_model_parallel_world_size(), ps.get_pipeline_model_parallel_rank()
        self.cp, self.cp_rank = ps.get_context_parallel_world_size(), ps.get_context_parallel_rank()
        self.dp, self.dp_rank = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
        self.ep, self.ep_rank = ps.get_expert_model_parallel_world_size(), ps.get_expert_model_parallel_rank()
        self.etp, self.etp_rank = ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank()
        self.edp_rank = ps.get_expert_data_parallel_rank()
        self.vpp: int | None = self.cfg.virtual_pipeline
        self.tp_group = ps.get_tensor_model_parallel_group()
        self.pp_group = ps.get_pipeline_model_parallel_group()
        self.cp_group = ps.get_context_parallel_group()
        self.dp_group = ps.get_data_parallel_group()
        self.dp_cp_group = ps.get_data_parallel_group(with_context_parallel=True)
        self.ep_group = ps.get_expert_model_parallel_group()
        self.expert_tp_group = ps.get_expert_tensor_parallel_group()

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    def tensor_cut(self, expert: bool) -> tuple[int, int]:
        """Returns (size, rank) of the tensor parallelism that shards an expert's parameter, or any other parameter."""
        return (self.etp, self.etp_rank) if expert else (self.tp, self.tp_rank)

    @contextlib.contextmanager
    def active(self) -> Iterator[Mesh]:
        """Makes this layout Megatron's current one; re-entrant, restores the previous one on exit."""
        outer = _snapshot()
        _restore(self._inner)
        try:
            yield self
        finally:
            self._inner = _snapshot()
            _restore(outer)

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "VPP": self.vpp or 1, "CP": self.cp, "EP": self.ep, "DP": self.dp}
        return " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one process"


class Meshes:
    """Meshes by layout: models with the same layout share process groups."""

    def __init__(self, timeout_s: float = 600.0, seed: int = 1) -> None:
        self.timeout_s, self.seed = timeout_s, seed
        self._by_layout: dict[ParallelConfig, Mesh] = {}

    def get(self, cfg: ParallelConfig) -> Mesh:
        """Returns the mesh of this layout, shared by all models that use it. Collective if the layout is new."""
        if cfg not in self._by_layout:
            self._by_layout[cfg] = Mesh(cfg, self.timeout_s, self.seed)
        return self._by_layout[cfg]


def _restore(state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(ps, name, value)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
