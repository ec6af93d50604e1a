"""Megatron's DDP, distributed optimizer and learning-rate schedule for one model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mrl import platform
from mrl.config.schema import OptimizerConfig
from mrl.parallel import Mesh

_WIDE = ParamKey(predicate=ParamPredicate("is_float32", lambda parameter: parameter.dtype == torch.float32))


def sums_overlap(mesh: Mesh) -> bool:
    """Returns True if the data-parallel gradient reduction overlaps the backward pass; gloo cannot run the two
    concurrently.
    """
    return platform.backend() == "nccl" and mesh.dp * mesh.cp > 1


def wrap_ddp(chunks: list[MegatronModule], *, overlap: bool = False) -> list[DistributedDataParallel]:
    """Wraps the chunks in DDP that accumulates and reduces gradients over DP x CP in float32, whatever the weights'
    dtype.

    overlap: each bucket is reduced as soon as the last micro-batch's backward pass has gone through its parameters
    (from the second pass on: the first one records when that is). New weights are always gathered at once: only modules
    that Megatron calls would wait for them, and the head, exports and copies read them otherwise.
    """
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        average_in_collective=False,
        fp8_param_gather=chunks[0].config.fp8_param,
        reuse_grad_buf_for_mxfp8_param_ag=_shares_buffers(chunks),
        check_for_nan_in_grad=False,  # it raises on the affected rank alone; Learner.step decides for all ranks
    )
    wrapped = [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]
    for chunk in wrapped:
        _keep_padding_between_buckets(chunk)
    if overlap:
        of_earlier = [chunk.no_sync for chunk in wrapped]
        chunks[0].config.no_sync_func = of_earlier[0] if len(wrapped) == 1 else of_earlier
    return wrapped


def _shares_buffers(chunks: list[MegatronModule]) -> bool:
    """Returns True if new weights are gathered in the gradient buffers, as Megatron requires for mxfp8 weights."""
    return bool(chunks[0].config.fp8_param) and chunks[0].config.fp8_recipe == "mxfp8"


def _keep_padding_between_buckets(chunk: DistributedDataParallel) -> None:
    """Keeps the padding between buckets in checkpoints; only the padding after the last bucket may be left out.

    Megatron joins a buffer's buckets without their padding, and then slices parameters at offsets that count it. With
    two buckets, as a tied embedding makes them, everything in the second one would be saved shifted.
    """
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        for bucket, (start, end) in zip(buffer.buckets[:-1], buffer.bucket_indices[:-1], strict=True):
            bucket.numel_unpadded = end - start
        buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)


def build_optimizer(
    cfg: OptimizerConfig, chunks: list[DistributedDataParallel], dtype: torch.dtype
) -> tuple[ChainedOptimizer, OptimizerParamScheduler]:
    """Returns AdamW on float32 main parameters, sharded over data parallelism, and its schedule.

    float32 parameters of a model in another dtype get a group of their own: in a mixed group Megatron confuses the two.
    """
    options = MegatronOptimizerConfig(
        optimizer="adam",
        lr=cfg.lr,
        min_lr=cfg.min_lr,
        weight_decay=cfg.weight_decay,
        adam_beta1=cfg.beta1,
        adam_beta2=cfg.beta2,
        adam_eps=cfg.eps,
        clip_grad=cfg.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        reuse_grad_buf_for_mxfp8_param_ag=_shares_buffers([chunk.module for chunk in chunks]),
    )
    groups = get_standard_config_overrides(options)
    if dtype != torch.float32:
        groups[_WIDE] = {}
    optimizer = get_megatron_optimizer(options, chunks, groups)
    parts = optimizer.chained_optimizers  # the dense part is empty if only experts' adapters are trained
    optimizer.chained_optimizers = [part for part in parts if not part.is_stub_optimizer]
    return optimizer, LearningRateSchedule(cfg, optimizer)


def grad_norm(optimizer: ChainedOptimizer) -> float:
    """Returns the gradient norm of the whole model over all ranks, equal on every rank. `apply_update` may follow."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())  # a tensor with some versions of transformer-engine


@torch.no_grad()
def apply_update(optimizer: ChainedOptimizer, norm: float) -> None:
    """Runs the second half of Megatron's own step: clips by `norm` from `grad_norm`, and updates."""
    for part in optimizer.chained_optimizers:
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
    optimizer.step_with_ready_grads()


def main_parameters(optimizer: ChainedOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (model parameter, float32 main weights [n] of the range of it that this data-parallel rank updates)."""
    for part in optimizer.chained_optimizers:
        groups = part.optimizer.param_groups
        for parameter, (group, place) in part.model_param_group_index_map.items():
            yield parameter, groups[group]["params"][place].detach()


def own_ranges(optimizer: ChainedOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (model parameter, [n], the range of the parameter itself that this data-parallel rank updates)."""
    for part in optimizer.chained_optimizers:
        for parameter in part.model_param_group_index_map:
            own = part._get_model_param_range_map(parameter)["param"]
            yield parameter, parameter.detach().view(-1)[own.start : own.end]


def gather_own_ranges(chunks: list[DistributedDataParallel]) -> None:
    """Gathers every data-parallel rank's range on all of them, after the ranges were written. Collective."""
    for chunk in chunks:
        chunk.start_param_sync()


@torch.no_grad()
def requantize_weights(optimizer: ChainedOptimizer, chunks: list[DistributedDataParallel]) -> None:
    """Requantizes fp8 weights from their main weights, as the last update did; does nothing without fp8 weights.
    Collective.

    A checkpoint holds their dequantized values in the model's dtype, which round differently.
    """
    bare = [chunk.module for chunk in chunks]
    if not bare[0].config.fp8_param:
        return
    for part in optimizer.chained_optimizers:
        if _shares_buffers(bare):
            part._copy_main_params_to_param_buffer()
        else:
            part._copy_main_params_to_model_params()
    gather_own_ranges(chunks)


def create_optimizer_state(optimizer: ChainedOptimizer) -> None:
    """Creates the Adam state, as zeros, that otherwise the first update would create."""
    platform.prime_adam(optimizer)
    for part in optimizer.chained_optimizers:
        part.init_state_fn(part.optimizer, part.config)


def has_finite_gradients(chunks: list[DistributedDataParallel]) -> Tensor:
    """Returns a scalar bool on the device: True if all of this rank's gradient buffers are finite, including replicas
    that the norm leaves out.

    True for a pipeline stage without trained parameters.
    """
    finite = torch.ones((), dtype=torch.bool, device=platform.device())
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            finite &= buffer.grad_data.norm().isfinite()
    return finite


class LearningRateSchedule(OptimizerParamScheduler):
    """Megatron's scheduler with the learning rates of `cfg`: the same function for every trainer."""

    def __init__(self, cfg: OptimizerConfig, optimizer: ChainedOptimizer) -> None:
        self._cfg = cfg
        super().__init__(
            optimizer,
            init_lr=0.0,
            max_lr=cfg.lr,
            min_lr=0.0,
            lr_warmup_steps=0,
            lr_decay_steps=1,
            lr_decay_style="constant",
            start_wd=cfg.weight_decay,
            end_wd=cfg.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Returns the learning rate of update `num_steps`, from 1; before the first update, the warm-up's start."""
        return self._cfg.learning_rate(self.num_steps)
