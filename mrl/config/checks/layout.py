"""Checks that each model can be laid out over the world, by Megatron-Core's rules, before anything starts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from mrl.config.checks.base import Archs, changed, one_of
from mrl.config.derived import Machine, data_parallel, expert_size, model_size
from mrl.config.problems import Problem
from mrl.config.sections.models import ParallelConfig
from mrl.config.trainers.base import AnyConfig, Config
from mrl.families import FAMILIES, ModelArch


def check(cfg: AnyConfig, archs: Archs, machine: Machine) -> Iterator[Problem]:
    """Yields layouts that do not fill the world, and models that a layout cannot split."""
    for name, use in cfg.models().items():
        if use.parallel is None:
            continue
        key, layout, arch = f"{name}.parallel", use.parallel, archs[name]
        path_key = "model.path" if use.path is None else f"{name}.path"
        yield from _world(key, layout, machine, arch)
        if arch is not None:
            yield from _tensor_and_context(key, layout, arch, path_key)
            yield from _pipeline(key, layout, arch, path_key)
            yield from _experts(key, layout, arch, path_key)
    yield from _machine(cfg, machine)


def _world(key: str, p: ParallelConfig, machine: Machine, arch: ModelArch | None) -> Iterator[Problem]:
    world = machine.world_size
    source = "the world" if machine.joined else "the world (run.nproc)"
    other = () if machine.joined else ("run.nproc",)
    if world % model_size(p):
        sizes = {"tensor": p.tensor, "pipeline": p.pipeline, "context": p.context}
        first = next(name for name, size in sizes.items() if size > 1)
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        others = model_size(p) // sizes[first]
        counts: Collection[int] = ()  # that the model's own shape must be divided by
        if arch is not None and first != "context":
            counts = _widths(arch).values() if first == "tensor" else [arch.num_layers]
        would = [n for n in range(1, world + 1) if world % (others * n) == 0 and not any(count % n for count in counts)]
        hint = f"use {first} {one_of(would)}" if would else f"use a multiple of {model_size(p)} ranks"
        message = f"{product} = {model_size(p)} ranks do not divide {source} of {world} ranks: {hint}"
        yield Problem((f"{key}.{first}", *other), message)
    if p.expert > 1 and world % expert_size(p):
        yield Problem(
            (f"{key}.expert", *other),
            f"expert_tensor {p.expert_tensor_size} x expert {p.expert} x pipeline {p.pipeline} = {expert_size(p)} "
            f"ranks do not divide {source} of {world} ranks: use a multiple of {expert_size(p)} ranks",
        )
    if p.pipeline == 1:
        for name in changed(p, "virtual_pipeline", "first_stage_layers", "last_stage_layers"):
            yield Problem((f"{key}.{name}", f"{key}.pipeline"), f"{dict(p)[name]} has no effect: pipeline is 1")
    elif p.virtual_pipeline == 1:
        message = "1 chunk per stage is the plain pipeline: leave it out, or use 2 or more"
        yield Problem((f"{key}.virtual_pipeline",), message)


def _tensor_and_context(key: str, p: ParallelConfig, arch: ModelArch, path_key: str) -> Iterator[Problem]:
    """Checks the sizes that tensor parallelism divides, and the heads of gated delta nets, which both divide."""
    widths = _widths(arch)
    wrong = [f"{count} {name}" for name, count in widths.items() if count % p.tensor]
    if wrong:
        message = f"{p.tensor} does not divide the model's {', '.join(wrong)}: use {_divisors(*widths.values())}"
        yield Problem((f"{key}.tensor", path_key), message)
    if p.context == 1 or arch.delta is None or arch.delta.key_heads % p.tensor:
        return
    if arch.delta.key_heads // p.tensor % p.context:
        message = f"tensor {p.tensor} x context {p.context} does not divide the {arch.delta.key_heads} key heads of "
        message += f"the model's gated delta nets: use a context that divides {arch.delta.key_heads // p.tensor}"
        yield Problem((f"{key}.context", path_key), message)


def _widths(arch: ModelArch) -> dict[str, int]:
    """Returns the sizes that tensor parallelism divides."""
    widths = {"attention heads": arch.num_heads, "key-value heads": arch.num_kv_heads}
    further = {"feed-forward width": arch.dense_width, "shared experts' width": arch.shared_width}
    if arch.latent is not None:
        further["rows of its down projection"] = arch.latent.rank + arch.latent.turned
        further["rows of its queries' down projection"] = arch.latent.query_rank
    if arch.delta is not None:
        further["key heads of its gated delta nets"] = arch.delta.key_heads
    return widths | {name: width for name, width in further.items() if width is not None}


def _pipeline(key: str, p: ParallelConfig, arch: ModelArch, path_key: str) -> Iterator[Problem]:
    """Checks that every stage has layers, that inner stages are equal, and that virtual chunks divide each stage."""
    if p.pipeline == 1:
        return
    if p.pipeline > arch.num_layers:
        message = f"{p.pipeline} stages for {arch.num_layers} layers: some stages would be empty; "
        message += f"use {_divisors(arch.num_layers)}"
        yield Problem((f"{key}.pipeline", path_key), message)
        return
    given = {"first_stage_layers": p.first_stage_layers, "last_stage_layers": p.last_stage_layers}
    fixed = {name: layers for name, layers in given.items() if layers is not None}
    named = tuple(f"{key}.{name}" for name in fixed) or (f"{key}.pipeline",)
    layers, stages = arch.num_layers - sum(fixed.values()), p.pipeline - len(fixed)
    if (layers > 0) != (stages > 0) or layers < 0 or (stages and layers % stages):
        left = f"{layers} layers for {stages} " + ("stages between them" if len(fixed) == 2 else "other stages")
        if fixed:
            message = f"{_amounts(fixed)} of {arch.num_layers} layers leave {left}, which need an equal number, at "
            message += f"least 1{_other_split(arch.num_layers, p.pipeline, fixed)}"
        else:
            message = f"{arch.num_layers} layers do not divide over {p.pipeline} stages: use "
            message += f"{_divisors(arch.num_layers)} stages, or set first_stage_layers or last_stage_layers for the "
            message += "uneven part"
        yield Problem((*named, path_key), message)
        return
    chunks = p.virtual_pipeline or 1
    per_stage = {**fixed, **({"the inner stages" if fixed else "each stage": layers // stages} if stages else {})}
    odd = {name: count for name, count in per_stage.items() if count % chunks}
    if odd:
        would = [count for count in _all_divisors(*per_stage.values()) if count > 1]
        message = f"{chunks} chunks per stage do not divide the layers of {_amounts(odd)}: "
        message += f"use {one_of(would)}" if would else "leave it out"
        yield Problem((f"{key}.virtual_pipeline", *named, path_key), message)


def _other_split(layers: int, pipeline: int, fixed: dict[str, int]) -> str:
    """Suggests a size for the first of the given stages, with the other one unchanged."""
    name, *others = fixed
    rest, stages = layers - sum(fixed[other] for other in others), pipeline - len(fixed)
    would = [n for n in range(1, rest + 1) if (rest - n) % stages == 0 and n < rest] if stages else [rest]
    would = [n for n in would if n > 0]
    return f": use {name} {one_of(would)}" if would else ""


def _all_divisors(*numbers: int) -> list[int]:
    common = math.gcd(*numbers)
    return [n for n in range(1, common + 1) if common % n == 0]


def _divisors(*numbers: int) -> str:
    """Formats the common divisors of the numbers."""
    return one_of(_all_divisors(*numbers))


def _amounts(layers: dict[str, int]) -> str:
    return " and ".join(f"{name} ({count})" for name, count in layers.items())


def _experts(key: str, p: ParallelConfig, arch: ModelArch, path_key: str) -> Iterator[Problem]:
    if arch.experts is None or arch.expert_width is None:
        for name, size in (("expert", p.expert), ("expert_tensor", p.expert_tensor or 1)):
            if size > 1:
                yield Problem((f"{key}.{name}", path_key), f"{size} needs a model with experts, not a dense one: use 1")
        return
    if arch.experts.count % p.expert:
        message = f"{p.expert} does not divide the model's {arch.experts.count} experts: "
        yield Problem((f"{key}.expert", path_key), message + f"use {_divisors(arch.experts.count)}")
    if arch.expert_width % p.expert_tensor_size:
        message = f"{p.expert_tensor_size} does not divide the experts' feed-forward width {arch.expert_width}: "
        message += f"use {_divisors(arch.expert_width)}"
        yield Problem((f"{key}.expert_tensor", path_key), message)
    if FAMILIES[arch.family].biases and p.expert_tensor_size > 1:
        message = f"{p.expert_tensor_size}: experts with biases, as in {arch.family}, need 1"
        if p.expert == 1:
            message += f"; with tensor {p.tensor}, that needs expert 2 or more"
        yield Problem((f"{key}.expert_tensor", f"{key}.expert", f"{key}.tensor"), message)
    elif p.expert == 1 and p.expert_tensor_size != p.tensor:
        size = p.expert_tensor_size
        message = f"with expert 1, {size} must equal tensor ({p.tensor}): Megatron would not sum the gradients"
        yield Problem((f"{key}.expert_tensor", f"{key}.tensor"), message)
    if p.tensor > 1 and not p.sequence:
        message = "must be true: with tensor > 1, a model with experts needs sequence parallelism"
        yield Problem((f"{key}.sequence", f"{key}.tensor"), message)


def _machine(cfg: AnyConfig, machine: Machine) -> Iterator[Problem]:
    if machine.gpus and machine.local_world_size > machine.gpus:
        yield Problem(("run.nproc",), f"{machine.local_world_size} processes, but this machine has {machine.gpus} GPUs")
    nodes = cfg.run.nodes
    if nodes is not None and nodes > 1 and machine.alone:
        message = f"the run needs {nodes} machines, and mrl train starts processes on this one only: start it with "
        yield Problem(("run.nodes",), message + f"--nodes {nodes}, or leave run.nodes out")
    elif nodes is not None and not machine.planned and machine.world_size != nodes * machine.local_world_size:
        message = f"{nodes} machines with {machine.local_world_size} processes each, but the started world has "
        yield Problem(("run.nodes",), message + f"{machine.world_size} ranks (WORLD_SIZE)")
    if machine.joined and cfg.run.nproc is not None and cfg.run.nproc != machine.local_world_size:
        counts = f"{cfg.run.nproc} processes per machine, but {machine.local_world_size} are started"
        yield Problem(("run.nproc",), f"{counts} (LOCAL_WORLD_SIZE)")


def check_shares(
    cfg: Config, machine: Machine, key: str, count: int, what: str = "samples", models: Sequence[str] | None = None
) -> Iterator[Problem]:
    """Checks that the samples of an update are enough for the data-parallel replicas of each trained model.

    Args:
        key: key that sets the number of samples
        count: samples that an update trains on
        models: models to check; None: all trained models
    """
    for name, use in cfg.models().items():
        if use.parallel is None or use.train is None or (models is not None and name not in models):
            continue
        dp = data_parallel(use.parallel, machine.world_size)
        if machine.world_size % model_size(use.parallel) == 0 and count < dp:
            message = f"{count} {what} are fewer than the {dp} data-parallel replicas that share them"
            yield Problem((key, f"{name}.parallel"), message)
