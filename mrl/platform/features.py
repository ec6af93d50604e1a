"""Optional parts beside mrl, their use, and the effect of their absence (`mrl doctor`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata

import torch

from mrl.fp8_chips import RECIPES
from mrl.kernels import native, triton_support
from mrl.platform.fp8 import fp8_problem, fp8_recipes
from mrl.platform.fused import (
    APEX_KERNEL,
    import_problem,
    transformer_engine_fault,
    transformer_engine_problem,
)


@dataclass(frozen=True)
class Feature:
    """An optional part. `version` is None if it is absent; `problem` says why an installed part is unusable."""

    part: str
    version: str | None
    used_for: str
    without: str
    problem: str | None = None

    @property
    def usable(self) -> bool:
        return self.version is not None and self.problem is None


@dataclass(frozen=True)
class _Part:
    package: str
    used_for: str
    without: str
    problem: Callable[[], str | None] = lambda: None  # for parts whose version does not imply that they work


def _transformer_engine() -> str | None:
    return transformer_engine_problem() if torch.cuda.is_available() else transformer_engine_fault()


_PARTS = (
    _Part("torch", "tensors, autograd, collectives", "mrl does not run"),
    _Part("megatron-core", "models, parallelism, optimizer, checkpoints", "mrl does not train"),
    _Part("transformers", "tokenizers, rope tables, the transformers engine", "mrl does not run"),
    _Part("sglang", "rollout.engine: sglang", "use rollout.engine: transformers, or rollout.urls"),
    _Part(
        "transformer-engine",
        "fused layers and flash attention on GPUs",
        "mrl's own attention and RMSNorm on torch",
        _transformer_engine,
    ),
    _Part(
        "apex",
        "fused Adam without transformer-engine, and fused accumulation of weight gradients; on GPUs",
        "torch's AdamW, and accumulation in a separate kernel",
        lambda: import_problem(APEX_KERNEL),
    ),
    _Part(
        "triton",
        "kernels of the loss head, GAE and the PPO loss on GPUs, and torch.compile there",
        "the torch form of each kernel",
        triton_support.compiler_problem,
    ),
    _Part(
        "nvidia-resiliency-ext",
        "run.launcher: ft (restarts failed and hung ranks)",
        "a failed rank ends the run; the same command resumes it from the last checkpoint",
    ),
)


def features() -> list[Feature]:
    """Returns one row a part, CUDA first. Never raises for a broken part: its row has the problem."""
    cuda = torch.version.cuda if torch.cuda.is_available() else None
    rows = [Feature("CUDA", cuda, "GPUs, nccl", "CPU and gloo: the same code, for small models")]
    rows += [_feature(part) for part in _PARTS]
    rows += [_native(), _fp8()]
    return [*rows, _gpu_tests({row.part: row.usable for row in rows})]


def _native() -> Feature:
    """The C compiler; compiles the native kernels if they never were."""
    used_for = "C kernels of layers, losses, advantages and engines on CPUs"
    return Feature("C compiler", native.compiler(), used_for, "the torch form of each kernel", native.problem())


def _fp8() -> Feature:
    """The usable fp8 recipes and, on a GPU, the reason against the others."""
    found = fp8_recipes()
    without = "fp8: {emulate: true} rounds the same on any machine"
    if torch.cuda.is_available() and (lacking := [recipe for recipe in RECIPES if recipe not in found]):
        without = f"{fp8_problem(lacking[0])}; {without}"
    return Feature("fp8", ", ".join(found) or None, "precision.fp8: 8-bit matrix products on GPUs", without)


def _gpu_tests(usable: Mapping[str, bool]) -> Feature:
    """The GPU test stages whose requirements are met. usable: by part"""
    needed = {"cuda": "CUDA", "engine": "transformers", "transformer_engine": "transformer-engine"}
    needed |= {"fp8": "fp8", "trainers": "CUDA", "speed": "CUDA", "ranks": "CUDA", "real": "sglang"}
    stages = [stage for stage, part in needed.items() if usable["CUDA"] and usable[part]]
    without = "no GPU: it has nothing to test here"
    if stages:
        lacking = [stage for stage in needed if stage not in stages]
        lacking += [] if usable["sglang"] else ["engine's checks of SGLang"]
        without = f"skipped here: {', '.join(lacking) or 'nothing'}"
    return Feature("make test-gpu", ", ".join(stages) or None, "tests of mrl on this GPU, in 10 minutes", without)


def _feature(part: _Part) -> Feature:
    try:
        version = metadata.version(part.package)
    except metadata.PackageNotFoundError:
        return Feature(part.package, None, part.used_for, part.without)
    return Feature(part.package, version, part.used_for, part.without, part.problem())
