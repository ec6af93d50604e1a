"""Megatron's DDP, distributed optimizer and learning-rate schedule for one model."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from mrl.config.schema import OptimizerConfig

_NO_DECAY_STEPS = 1 << 60


def wrap_ddp(chunks: list[MegatronModule]) -> list[DistributedDataParallel]:
    """Gradients accumulate in float32 buffers and are summed over DP x CP in float32, whatever the weights' dtype."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=False,
        average_in_collective=False,
        check_for_nan_in_grad=True,
    )
    wrapped = [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]
    for chunk in wrapped:
        _keep_padding_between_buckets(chunk)
    return wrapped


def _keep_padding_between_buckets(chunk: DistributedDataParallel) -> None:
    """For checkpoints Megatron joins a buffer's buckets without their padding, and then cuts parameters out at places
    that count it. Two buckets, as a tied embedding makes them, would save everything in the second one shifted. Only
    the padding after the last bucket may be left out.
    """
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        for bucket, (start, end) in zip(buffer.buckets[:-1], buffer.bucket_indices[:-1], strict=True):
            bucket.numel_unpadded = end - start
        buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)


def build_optimizer(
    cfg: OptimizerConfig, chunks: list[DistributedDataParallel], dtype: torch.dtype
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW on float32 main parameters, sharded over data parallelism, and its schedule."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
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
        ),
        chunks,
    )
    return optimizer, build_schedule(cfg, optimizer)


def build_schedule(cfg: OptimizerConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Update k (from 1) uses lr * k / warmup_steps during warm-up, then the decay towards min_lr."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=cfg.lr,
        min_lr=cfg.min_lr if cfg.decay != "constant" else min(cfg.min_lr, cfg.lr),
        lr_warmup_steps=cfg.warmup_steps,
        lr_decay_steps=cfg.decay_steps or _NO_DECAY_STEPS,
        lr_decay_style=cfg.decay,
        start_wd=cfg.weight_decay,
        end_wd=cfg.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
