"""Adapters: do they fit the model, its layout and what else is asked of it?"""

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

CPU_WIDTHS = 32  # SGLang's CPU form cuts the width of MLPs in multiples of it
MLP = {"gate_proj", "up_proj", "down_proj"}


def check(cfg: Config, archs: Archs) -> Iterator[Problem]:
    """Of every model that is trained by adapters."""
    for name, model in cfg.built().items():
        if model.train.lora is None or not model.is_trained:
            continue
        key = f"{name}.lora"
        if cfg.model.from_scratch and model.path is None:
            message = "adapters belong to weights that are on disk, from_scratch: true makes new ones"
            yield Problem((key, "model.from_scratch"), message)
        elif is_converted(model.path or cfg.model.path):
            path_key = "model.path" if model.path is None else f"{name}.path"
            message = "is a converted directory: adapters belong to the Hugging Face one, which PEFT reads too"
            yield Problem((path_key, key), message)
        elif archs.get(name) is not None and packing(hf_keys(model.path or cfg.model.path)) is not None:
            message = "its weights are packed, and adapters could not be merged into them: make plain ones of them "
            message += "first, by mrl convert hf-to-megatron and then megatron-to-hf"
            yield Problem(("model.path" if model.path is None else f"{name}.path", key), message)
        if (recipe := model.train.precision.fp8.recipe) != "none":
            message = f"not with {recipe}: adapters are trained beside weights of 16 or 32 bits"
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
        message = f"{cfg.trainer} compares a policy with itself, which dropout would make two: sft only"
        yield Problem((key, "trainer"), message)
    if train.lora.dora:
        yield Problem((key, f"{name}.lora.dora"), "DoRA has no dropout here: PEFT's would drop of the base's input too")
    if train.recompute == "selective" and train.parallel.pipeline > 1:
        message = "parts of a layer that are computed again would not know of which batch they are: none, or full"
        yield Problem((f"{name}.recompute", key), message)


def _targets(name: str, train: TrainConfig, arch: ModelArch) -> Iterator[Problem]:
    assert train.lora is not None
    key, spec = f"{name}.lora.targets", train.lora.spec
    if not spec.targets:
        yield Problem((key,), "names no layer: all-linear takes every one")
    if unknown := without_layer(arch, spec):
        there = ", ".join(layer_names(arch))
        message = f"the model has no linear layer {', '.join(unknown)}, but {there} (all-linear: each of them)"
        yield Problem((key, "model.path"), message)
    if joined := joined_layers(arch, spec):
        message = f"adapters of {', '.join(joined)}, which are several layers in one, are not supported: other targets"
        yield Problem((key, "model.path"), message)
    if not takes_experts(arch, spec):
        return
    if train.parallel.expert_tensor_size > 1:
        message = f"adapters of experts need 1, not {train.parallel.expert_tensor_size}, or targets in attention alone"
        yield Problem((f"{name}.parallel.expert_tensor", key), message)
    if train.lora.dropout:
        yield Problem((f"{name}.lora.dropout", key), "not of experts, which do not know whose tokens they get")
    if train.layers != "local":
        message = "adapters of experts take local layers (one after the other), or targets in attention alone"
        yield Problem((key, f"{name}.layers"), message)


def check_sync(cfg: RLConfig, arch: ModelArch | None, machine: Machine) -> Iterator[Problem]:
    """Of adapters that are sent as they are: whether the engine computes with them as the trainer does."""
    key, lora = "sync.lora", cfg.actor.lora
    if cfg.sync.lora == "merge":
        return
    if lora is None:
        yield Problem((key, "actor.lora"), "adapter: the actor has none, all of its weights are trained")
        return
    if ENGINES[cfg.rollout.engine].is_plain:
        message = f"the {cfg.rollout.engine} engine takes whole weights only: merge, or rollout.engine: sglang"
        yield Problem((key, "rollout.engine"), message)
        return
    if lora.dora:
        yield Problem((key, "actor.lora.dora"), "SGLang knows no DoRA, and would leave the magnitudes out: merge")
    if arch is not None and takes_experts(arch, lora.spec):
        yield Problem((key, "actor.lora.targets"), "adapters of experts are sent merged only: merge, or other targets")
    if arch is not None and FAMILIES[arch.family].local_only is not None:
        yield Problem((key, "model.path"), f"adapters of {arch.family} are sent merged only: merge")
    if cfg.rollout.quantization != "none":
        message = "the engine reads its own weights from the model's directory, which fp8 would not let it: merge"
        yield Problem((key, "rollout.quantization"), message)
    if cfg.rollout.release == "all":
        message = "no push brings back the weights that all gives up: merge, or release: cache"
        yield Problem((key, "rollout.release"), message)
    because = "adapters go with a request each, by value"
    yield from without_effect(cfg.sync, "sync", ["transport", "bucket_mib"], because, key)
    yield from _engine_reads(cfg, arch, machine)


def _engine_reads(cfg: RLConfig, arch: ModelArch | None, machine: Machine) -> Iterator[Problem]:
    """Whether engines of ours have the model's weights, in the shapes of the adapters."""
    if cfg.rollout.urls:
        return
    pickled, safe = (any(Path(cfg.model.path).glob(pattern)) for pattern in ("*.bin", "*.safetensors"))
    if pickled and not safe:
        message = "the engine reads the weights beside the adapters from safetensors, and there are pickles only: merge"
        yield Problem(("sync.lora", "model.path"), message)
    multiple, lora = CPU_WIDTHS * cfg.rollout.tensor, cfg.actor.lora
    if arch is None or lora is None or machine.gpus != 0 or not MLP & {*adapted_parts(arch, lora.spec)}:
        return
    if odd := sorted({layer.ffn_size for layer in arch.layers if layer.ffn_size % multiple}):
        message = (
            f"SGLang on a CPU fills MLPs up to a multiple of {multiple}, the model has {one_of(odd)}: an adapter would "
            "not fit it and end the engine: merge, or targets in attention alone"
        )
        yield Problem(("sync.lora", "model.path"), message)
