"""Checks of fp8 by transformer-engine's rules, before anything starts.

Properties of the GPU are checked where the GPU is: mrl.preflight.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks.base import Archs, without_effect
from mrl.config.derived import Machine
from mrl.config.fp8_shapes import BLOCK, token_unit, widths
from mrl.config.problems import Problem
from mrl.config.sections.models import TrainConfig
from mrl.config.sections.precision import FP8Config
from mrl.config.trainers.base import Config, ModelSpec, section_of
from mrl.families import FAMILIES, ModelArch

_OF_DELAYED = ("history", "history_use", "margin")


def check(cfg: Config, archs: Archs, machine: Machine) -> Iterator[Problem]:
    """Yields contradictions, settings without effect and sizes that do not divide.

    Skips an untrained model with the path, precision and layout of the actor, since its problems would be the actor's.
    """
    actor = cfg.built()["actor"]
    for name, model in cfg.built().items():
        if name != "actor" and not model.is_trained and _is_like(model, actor):
            continue
        section = section_of(name)
        key, fp8 = f"{section}.precision.fp8", model.train.precision.fp8
        if fp8.recipe == "none":
            names = [field for field in FP8Config.model_fields if field != "recipe"]
            yield from without_effect(fp8, key, names, "no recipe is chosen", f"{key}.recipe")
            continue
        yield from _place(cfg, section, key, fp8, machine)
        yield from _settings(key, fp8, is_policy=not model.scores)
        yield from _tokens(section, key, model.train)
        arch = archs.get(section)
        if arch is not None:
            yield from _family(key, fp8, arch)
            yield from _layers(section, key, model.train, arch)
            yield from _sizes(section, key, model, arch)
    yield from _weights_in_fp8(cfg)
    real = [
        f"{section_of(name)}.precision.fp8.recipe"
        for name, model in cfg.built().items()
        if (fp8 := model.train.precision.fp8).recipe == "delayed" and not fp8.emulate
    ]
    if len(real) > 1:  # transformer-engine keeps one state per process
        message = f"{len(real)} models use delayed scaling, and a process can hold the state of 1: use current"
        yield Problem((*reversed(real),), message)


def _is_like(model: ModelSpec, actor: ModelSpec) -> bool:
    mine, theirs = dict(model.train), dict(actor.train)
    names = ("precision", "parallel", "max_tokens_per_microbatch")
    return model.path is None and all(mine[name] == theirs[name] for name in names)


def _place(cfg: Config, section: str, key: str, fp8: FP8Config, machine: Machine) -> Iterator[Problem]:
    """Checks which layers compute the products, and on which device."""
    layers = cfg.built()["actor"].train.layers if section not in ("actor", "critic") else None
    layers_key = f"{section if layers is None else 'actor'}.layers"
    chosen = layers or cfg.built()[section].train.layers
    if fp8.emulate:
        if chosen == "transformer_engine":
            message = "only mrl's own layers emulate fp8: set layers: auto or local"
            yield Problem((f"{key}.emulate", layers_key), message)
        if fp8.params:
            message = "has no effect: emulated layers store weights in model.dtype"
            yield Problem((f"{key}.params", f"{key}.emulate"), message)
        return
    if machine.gpus == 0:
        message = f"{fp8.recipe} needs GPUs, and this machine has 0: set emulate: true, which rounds alike anywhere"
        yield Problem((f"{key}.recipe", f"{key}.emulate"), message)
    if chosen == "local":
        message = f"{fp8.recipe} needs transformer-engine's layers, not local ones: set layers: auto, or emulate: true"
        yield Problem((f"{key}.recipe", layers_key), message)
    if cfg.model.dtype == "float32":
        message = f"{fp8.recipe} needs model.dtype bfloat16, not float32: set bfloat16, or emulate: true"
        yield Problem((f"{key}.recipe", "model.dtype"), message)


def _family(key: str, fp8: FP8Config, arch: ModelArch) -> Iterator[Problem]:
    lacks = FAMILIES[arch.family].local_only
    if (arch.latent is not None or arch.delta is not None) and fp8.emulate:
        message = "emulated layers do not support this model's attention"
        yield Problem((f"{key}.emulate", "model.path"), f"{message} ({lacks}): set recipe: none")
    if FAMILIES[arch.family].biases and fp8.emulate:
        message = f"emulated layers do not support experts with biases, as in {arch.family}: set recipe: none"
        yield Problem((f"{key}.emulate", "model.path"), message)
    if lacks is not None and not fp8.emulate:
        message = f"{fp8.recipe} needs transformer-engine's layers, which do not support {arch.family}"
        yield Problem((f"{key}.recipe", "model.path"), f"{message} ({lacks}): set emulate: true, or recipe: none")


def _settings(key: str, fp8: FP8Config, is_policy: bool) -> Iterator[Problem]:
    recipe = f"{key}.recipe"
    if fp8.recipe != "delayed":
        yield from without_effect(fp8, key, list(_OF_DELAYED), f"{fp8.recipe} scales by current values", recipe)
        if not fp8.wgrad:
            yield Problem((f"{key}.wgrad", recipe), f"false needs recipe: delayed, not {fp8.recipe}")
    else:
        if fp8.first_last_bf16:
            message = f"must be 0 with delayed scaling, which keeps one state for all layers; got {fp8.first_last_bf16}"
            yield Problem((f"{key}.first_last_bf16", recipe), message)
        if fp8.params:
            yield Problem((f"{key}.params", recipe), "fp8 weights need current scales: use another recipe than delayed")
    if fp8.head and not is_policy:
        yield Problem((f"{key}.head",), "has no effect: a head with 1 output is not computed in fp8")


def _tokens(section: str, key: str, train: TrainConfig) -> Iterator[Problem]:
    layout, recipe = train.parallel, train.precision.fp8.recipe
    unit, most = token_unit(layout, recipe), train.max_tokens_per_microbatch
    if most % unit:
        would = f"{most // unit * unit} or {(most // unit + 1) * unit}" if most > unit else str(unit)
        message = f"{most} is not a multiple of {unit} tokens = {recipe}'s {BLOCK[recipe]} x tensor {layout.tensor} x "
        message += f"context {layout.context}, to which micro-batches are padded: use {would}"
        yield Problem((f"{section}.max_tokens_per_microbatch", f"{key}.recipe"), message)


def _layers(section: str, key: str, train: TrainConfig, arch: ModelArch) -> Iterator[Problem]:
    """Checks the layers at the ends that are not in fp8, and those that are recomputed."""
    fp8, stages = train.precision.fp8, train.parallel.pipeline
    if (both := 2 * fp8.first_last_bf16) >= arch.num_layers:
        message = f"{fp8.first_last_bf16} layers at each end are {both} of the model's {arch.num_layers}: use fewer"
        yield Problem((f"{key}.first_last_bf16",), message)
    elif fp8.first_last_bf16 > arch.num_layers // stages:
        message = f"{fp8.first_last_bf16} exceeds the {arch.num_layers // stages} layers of a pipeline stage: use fewer"
        yield Problem((f"{key}.first_last_bf16",), message)

    if fp8.recipe == "delayed" and not fp8.emulate and train.recompute == "selective" and arch.experts is not None:
        message = f"selective recomputes activations of {arch.experts.count} experts, which delayed rules out: use full"
        yield Problem((f"{section}.recompute", f"{key}.recipe"), message)


def _sizes(section: str, key: str, model: ModelSpec, arch: ModelArch) -> Iterator[Problem]:
    """Checks that sizes are multiples of a block. Emulation also allows smaller blocks at an edge."""
    fp8, layout = model.train.precision.fp8, model.train.parallel
    if fp8.emulate:
        return
    block = BLOCK[fp8.recipe]
    for name, (whole, ranks) in widths(arch, layout).items():
        if whole % ranks == 0 and whole // ranks % block:
            where = f"{whole} / {ranks} ranks = {whole // ranks}" if ranks > 1 else str(whole)
            message = f"{fp8.recipe} needs multiples of {block} per rank, and the model's {name} is {where}"
            yield Problem((f"{key}.recipe", f"{section}.parallel.tensor"), message)


def _weights_in_fp8(cfg: Config) -> Iterator[Problem]:
    """Checks fp8 weights against features that write weights in model.dtype only."""
    for name, model in cfg.built().items():
        key = f"{section_of(name)}.precision.fp8.params"
        if not model.train.precision.fp8.params:
            continue
        if model.train.offload == "all":
            offload = f"{section_of(name)}.offload"
            yield Problem((offload, key), "all does not support fp8 weights: use optimizer")
        if name == "actor" and (copies := cfg.copies()):
            message = f"does not work with float32 copies of the actor ({', '.join(copies)}): set it to false"
            yield Problem((key,), message)
