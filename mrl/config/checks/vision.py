"""Checks of vision models: supported trainers, data and engines."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks.base import Archs, without_effect
from mrl.config.derived import first_chunk_layers, model_size
from mrl.config.problems import Problem
from mrl.config.trainers.base import Config, section_of
from mrl.families import ModelArch, VisionArch

SGLANG_PATCH_VALUES = 1176  # 0.5.23, get_image_feature of models/qwen2_5_vl.py


def check(cfg: Config, archs: Archs) -> Iterator[Problem]:
    """Checks every run of language models."""
    seeing = {name: arch for name, arch in archs.items() if arch is not None and arch.vision is not None}
    if "actor" not in seeing and archs.get("actor") is not None:
        yield from _unseen(cfg)
    if not seeing:
        return
    if not cfg.sees_pictures:
        message = f"{cfg.trainer} does not support vision models: use rl, reward_model or dpo"
        yield Problem(("trainer", "model.path"), message)
        return
    yield from _alike(cfg, archs, seeing)
    for name, arch in seeing.items():
        yield from _deep(cfg, name, arch)
    for name, model in cfg.built().items():
        section = section_of(name)
        if section not in seeing:
            continue
        if model.train.lora is not None and model.is_trained:
            yield Problem((f"{section}.lora", "model.path"), "is not supported for vision models")
        if model.train.precision.fp8.recipe != "none":
            yield Problem((f"{section}.precision.fp8.recipe", "model.path"), "is not supported for vision models")
    if "actor" in seeing and cfg.has_turns:
        yield Problem(("agent", "model.path"), "is not supported for vision models: later turns would lack the images")
    if "actor" in seeing:
        yield from _data(cfg)
        yield from _engine(cfg, seeing["actor"])


def _unseen(cfg: Config) -> Iterator[Problem]:
    """Checks a text model for image settings without effect."""
    because, other = "the model reads no images", "model.path"
    yield from without_effect(cfg.model.vision, "model.vision", ["train"], because, other)
    for key, use in cfg.data_uses().items():
        yield from without_effect(use.cfg, key, ["images_key", "max_images", "max_image_tokens"], because, other)
    if (rewards := cfg.rewards()) is not None:
        yield from without_effect(rewards, "reward", ["pictures"], because, other)


def _data(cfg: Config) -> Iterator[Problem]:
    for key, use in cfg.data_uses().items():
        if not use.is_sampled and use.preferences is None:
            yield Problem((key, "model.path"), "demonstrations with images are not supported: use a text model")
        elif use.cfg.truncation not in ("drop", "error"):
            message = f"{use.cfg.truncation} could truncate inside an image: use drop or error"
            yield Problem((f"{key}.truncation", "model.path"), message)


def _alike(cfg: Config, archs: Archs, seeing: dict[str, ModelArch]) -> Iterator[Problem]:
    """Checks that all models process images alike, or none does. One of actor and reward model may be text-only."""
    actor = archs.get("actor")
    theirs = actor.vision if actor is not None else None
    for name, arch in archs.items():
        if arch is None or (name == "actor" and arch.vision is not None):
            continue
        mine = arch.vision
        if mine is None or theirs is None:
            differs = (mine is None) != (theirs is None) and name != "reward.model"
        else:
            differs = _sight(mine) != _sight(theirs)
        if differs:
            yield Problem((f"{name}.path", "model.path"), "processes images differently from the actor, or not at all")


def _sight(vision: VisionArch) -> tuple[int, ...]:
    """Returns the settings that determine the tokens and patches of an image."""
    return vision.unit, vision.patch, vision.merge, vision.temporal, vision.channels, vision.image_token


def _deep(cfg: Config, name: str, arch: ModelArch) -> Iterator[Problem]:
    layout = cfg.models()[name].parallel
    assert arch.vision is not None
    if layout is None or layout.pipeline == 1 or model_size(layout) < 1:
        return
    deep, first = len(arch.vision.deep), first_chunk_layers(layout, arch.num_layers)
    if first < deep:
        chunk = "chunk of the first stage" if layout.virtual_pipeline else "stage"
        message = f"the first {chunk} has {first} layers, and must have the {deep} that take deep image features"
        yield Problem((f"{name}.parallel.first_stage_layers", f"{name}.parallel.pipeline"), message)


def _engine(cfg: Config, arch: ModelArch) -> Iterator[Problem]:
    found = cfg.engines()
    if found is None or arch.vision is None:
        return
    rollout, values = found[0], arch.vision.patch_values
    if rollout.engine == "sglang" and arch.family == "qwen2_5_vl" and values != SGLANG_PATCH_VALUES:
        message = f"patches of {values} values: SGLang's Qwen2.5-VL supports only {SGLANG_PATCH_VALUES} (14 x 14 "
        yield Problem(("rollout.engine", "model.path"), message + "pixels): set rollout.engine: transformers")
    if rollout.quantization != "none":
        yield Problem(("rollout.quantization", "model.path"), "is not supported for vision models")
    if rollout.urls and cfg.model.vision.train:
        message = (
            "must be false with servers that mrl does not start: SGLang caches image features of older weights unless "
            "it is started with SGLANG_VLM_CACHE_SIZE_MB=0"
        )
        yield Problem(("model.vision.train", "rollout.urls"), message)
