"""Checks that LoRA adapters fit the model, its layout and the other settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mrl.config.checks.base import Archs, one_of, without_effect
from mrl.config.derived import Machine
from mrl.config.engines import ENGINES
from mrl.config.model_dirs import is_converted
from mrl.config.problems import Problem
from mrl.config.sections.models import TrainConfig
from mrl.config.trainers.base import Config
from mrl.config.trainers.rl import RLConfig
from mrl.families import FAMILIES, ModelArch, hf_keys
from mrl.families.adapters import adapted_parts, joined_layers, layer_names, takes_experts, without_layer
from mrl.families.decoder import packing

CPU_WIDTHS = 32  # SGLang on CPUs splits the width of MLPs in multiples of this
MLP = {"gate_proj", "up_proj", "down_proj"}


def check(cfg: Config, archs: Archs) -> Iterator[Problem]:
    """Checks every model that trains adapters."""
    for name, model in cfg.built().items():
        if model.train.lora is None or not model.is_trained:
            continue
        key = f"{name}.lora"
        if cfg.model.from_scratch and model.path is None:
            message = "adapters need base weights on disk, and from_scratch: true makes random ones: set it to false"
            yield Problem((key, "model.from_scratch"), message)
        elif is_converted(model.path or cfg.model.path):
            path_key = "model.path" if model.path is None else f"{name}.path"
            message = "is a Megatron checkpoint: for adapters, name the Hugging Face directory, which PEFT reads too"
            yield Problem((path_key, key), message)
        elif archs.get(name) is not None and packing(hf_keys(model.path or cfg.model.path)) is not None:
            message = "its weights are packed, and adapters cannot be merged into them: unpack them first with "
            message += "mrl convert hf-to-megatron and then megatron-to-hf"
            yield Problem(("model.path" if model.path is None else f"{name}.path", key), message)
        if (recipe := model.train.precision.fp8.recipe) != "none":
            message = f"does not work with {recipe}: adapters need base weights of 16 or 32 bits"
            yield Problem((key, f"{name}.precision.fp8.recipe"), message)
        yield from _dropout(cfg, name, model.train)
        if (arch := archs.get(name)) is not None:
            yield from _targets(name, model.train, arch)


def _dropout(cfg: Config, name: str, train: TrainConfig) -> Iterator[Problem]:
    assert train.lora is not None
    key = f"{name}.lora.dropout"
    if not train.lora.dropout:
        return
    if cfg.trainer != "sft":
        message = f"{cfg.trainer} compares log-probs of one policy, which dropout would change: use it with sft only"
        yield Problem((key, "trainer"), message)
    if train.lora.dora:
        yield Problem((key, f"{name}.lora.dora"), "DoRA does not support dropout here: set dropout to 0")
    if train.recompute == "selective" and train.parallel.pipeline > 1:
        message = "selective recomputes with the wrong dropout mask under pipeline parallelism: use none or full"
        yield Problem((f"{name}.recompute", key), message)


def _targets(name: str, train: TrainConfig, arch: ModelArch) -> Iterator[Problem]:
    assert train.lora is not None
    key, spec = f"{name}.lora.targets", train.lora.spec
    if not spec.targets:
        yield Problem((key,), "names no layer: use all-linear for all of them")
    if unknown := without_layer(arch, spec):
        there = ", ".join(layer_names(arch))
        message = f"the model has no linear layer {', '.join(unknown)}: available: {there}, or all-linear"
        yield Problem((key, "model.path"), message)
    if joined := joined_layers(arch, spec):
        message = f"adapters of the fused layers {', '.join(joined)} are not supported: choose other targets"
        yield Problem((key, "model.path"), message)
    if not takes_experts(arch, spec):
        return
    if train.parallel.expert_tensor_size > 1:
        message = f"adapters of experts need 1, not {train.parallel.expert_tensor_size}; or target attention only"
        yield Problem((f"{name}.parallel.expert_tensor", key), message)
    if train.lora.dropout:
        yield Problem((f"{name}.lora.dropout", key), "is not supported in experts: set 0, or target attention only")
    if train.layers != "local":
        message = "adapters of experts need local layers: set layers: local, or target attention only"
        yield Problem((key, f"{name}.layers"), message)


def check_sync(cfg: RLConfig, arch: ModelArch | None, machine: Machine) -> Iterator[Problem]:
    """Checks that engines can compute with adapters that are synced unmerged."""
    key, lora = "sync.lora", cfg.actor.lora
    if cfg.sync.lora == "merge":
        return
    if lora is None:
        yield Problem((key, "actor.lora"), "adapter needs LoRA adapters, and the actor trains all weights: set merge")
        return
    if ENGINES[cfg.rollout.engine].is_plain:
        message = f"the {cfg.rollout.engine} engine takes whole weights only: set merge, or rollout.engine: sglang"
        yield Problem((key, "rollout.engine"), message)
        return
    if lora.dora:
        yield Problem((key, "actor.lora.dora"), "SGLang does not support DoRA: set sync.lora: merge")
    if arch is not None and takes_experts(arch, lora.spec):
        message = "adapters of experts can only be synced merged: set merge, or other targets"
        yield Problem((key, "actor.lora.targets"), message)
    if arch is not None and FAMILIES[arch.family].local_only is not None:
        yield Problem((key, "model.path"), f"adapters of {arch.family} can only be synced merged: set merge")
    if cfg.rollout.quantization != "none":
        message = "with adapters the engine loads base weights from model.path, which fp8 does not support: set merge"
        yield Problem((key, "rollout.quantization"), message)
    if cfg.rollout.release == "all":
        message = "an adapter sync does not restore the released base weights: set merge, or rollout.release: cache"
        yield Problem((key, "rollout.release"), message)
    because = "adapters are sent inside requests"
    yield from without_effect(cfg.sync, "sync", ["transport", "bucket_mib", "delta"], because, key)
    yield from _engine_reads(cfg, arch, machine)


def _engine_reads(cfg: RLConfig, arch: ModelArch | None, machine: Machine) -> Iterator[Problem]:
    """Checks that engines started by mrl can load the base weights in the shapes of the adapters."""
    if cfg.rollout.urls:
        return
    pickled, safe = (any(Path(cfg.model.path).glob(pattern)) for pattern in ("*.bin", "*.safetensors"))
    if pickled and not safe:
        message = "the engine loads base weights from safetensors, and model.path has pickles only: set merge"
        yield Problem(("sync.lora", "model.path"), message)
    multiple, lora = CPU_WIDTHS * cfg.rollout.tensor, cfg.actor.lora
    if arch is None or lora is None or machine.gpus != 0 or not MLP & {*adapted_parts(arch, lora.spec)}:
        return
    if odd := sorted({layer.ffn_size for layer in arch.layers if layer.ffn_size % multiple}):
        message = (
            f"SGLang on a CPU pads MLPs to a multiple of {multiple}, and the model has {one_of(odd)}, so that adapters "
            "do not fit: set merge, or target attention only"
        )
        yield Problem(("sync.lora", "model.path"), message)
