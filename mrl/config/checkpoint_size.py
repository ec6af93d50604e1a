"""Disk space of a run's checkpoints and exports."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.checks.base import Archs
from mrl.config.trainers.base import Config
from mrl.families.adapters import num_trained
from mrl.families.flops import num_parameters
from mrl.families.table import Role

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FLOAT32 = 4
OPTIMIZER = 3 * FLOAT32  # float32 main weights and both Adam moments


def checkpoint_bytes(cfg: Config, archs: Archs) -> int:
    """Returns the bytes of the tensors of one checkpoint.

    Args:
        archs: shapes of every trained model
    """
    total = 0
    for name, built in cfg.built().items():
        if not built.is_trained:
            continue
        arch = archs[name]
        assert arch is not None
        role: Role = "critic" if built.scores else "policy"
        count = sum(num_trained(arch, role, lora.spec) for lora in built.loras)
        total += (count or num_parameters(arch, role, built.train.parallel.tensor)) * bytes_a_weight(cfg, name)
    return total


def bytes_a_weight(cfg: Config, model: str) -> int:
    """Returns the bytes that a checkpoint stores per weight of a model: weight, optimizer state and float32 copies."""
    copies = len(cfg.copies()) if model == "actor" else 0
    return DTYPE_BYTES[cfg.model.dtype] + OPTIMIZER + copies * FLOAT32


def export_bytes(cfg: Config, archs: Archs) -> int:
    """Returns the bytes of the actor's weights as a Hugging Face directory."""
    arch = archs["actor"]
    assert arch is not None
    role: Role = "critic" if cfg.built()["actor"].scores else "policy"
    return num_parameters(arch, role) * DTYPE_BYTES[cfg.model.dtype]


@dataclass(frozen=True)
class DiskUse:
    """Upper bounds of the disk space of a run's checkpoints and exports, in bytes.

    Attributes:
        turning: checkpoints that are replaced during the run, including the one being written
        staying: files that are never removed, at the end of the run. Excludes files written every n steps if the number
            of steps depends on the data.
    """

    turning: int
    staying: int


def disk_use(cfg: Config, archs: Archs) -> DiskUse:
    kept, steps = cfg.effective_checkpoint, None if cfg.steps_follow_data() else cfg.run.steps
    turning = staying = 0
    if kept.every_steps is not None:
        one, last = checkpoint_bytes(cfg, archs), kept.keep_last + 1
        every = 1 if cfg.keeps_best() else kept.every_steps  # with keep_best, a checkpoint can be due at any step
        made = -(-steps // every) if steps is not None else last
        turning = one * (min(last, made) + cfg.keeps_best())
        if kept.keep_every_steps is not None:
            staying += one * (max(0, made - last) * every // kept.keep_every_steps)
    exports = steps // kept.weights_every_steps if steps is not None and kept.weights_every_steps is not None else 0
    arch, loras = archs["actor"], cfg.built()["actor"].loras
    assert arch is not None
    adapters = sum(num_trained(arch, "policy", lora.spec) for lora in loras) * DTYPE_BYTES[cfg.model.dtype]
    whole = export_bytes(cfg, archs)
    staying += exports * (adapters or whole)
    if kept.export_hf:
        averages = "moving average" in cfg.copies()
        merged = 0 if cfg.adapter_configs() else whole  # several adapters are exported unmerged
        staying += (1 + cfg.keeps_best()) * (adapters + merged) + averages * whole
    return DiskUse(turning, staying)
