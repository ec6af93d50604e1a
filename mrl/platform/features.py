"""What is installed beside mrl, what it is for, and what happens without it (`mrl doctor`)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata

import torch
from rich.table import Table


@dataclass(frozen=True)
class Feature:
    """`version` is None if the part is absent; `problem` says why an installed part cannot be used."""

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
    module: str
    used_for: str
    without: str
    import_it: bool = False  # an installed version says little: only an import shows that it works


_PARTS = (
    _Part("torch", "torch", "tensors, autograd, collectives", "mrl does not run"),
    _Part("megatron-core", "megatron.core", "models, parallelism, optimizer, checkpoints", "mrl does not train"),
    _Part("transformers", "transformers", "tokenizers, rope tables, the transformers engine", "mrl does not run"),
    _Part("sglang", "sglang", "rollout.engine: sglang", "use rollout.engine: transformers, or rollout.urls"),
    _Part(
        "transformer-engine",
        "transformer_engine",
        "fused layers and flash attention on GPUs",
        "mrl's own attention and RMSNorm on torch",
        import_it=True,
    ),
    _Part("apex", "apex", "fused Adam and gradient accumulation on GPUs", "torch's AdamW", import_it=True),
    _Part(
        "nvidia-resiliency-ext",
        "nvidia_resiliency_ext",
        "run.launcher: ft (restarts failed and hung ranks)",
        "a failed rank ends the run; the same command goes on from the last checkpoint",
    ),
)


def features() -> list[Feature]:
    """One row a part, CUDA first. Never raises for a part that is broken: its row says what is wrong."""
    cuda = torch.version.cuda if torch.cuda.is_available() else None
    rows = [Feature("CUDA", cuda, "GPUs, nccl", "CPU and gloo: the same code, for small models")]
    return rows + [_feature(part) for part in _PARTS]


def transformer_engine_usable() -> bool:
    """CUDA is there and transformer-engine can be imported."""
    return torch.cuda.is_available() and _problem("transformer_engine") is None


def apex_usable() -> bool:
    return torch.cuda.is_available() and _problem("apex") is None


def _feature(part: _Part) -> Feature:
    try:
        version = metadata.version(part.package)
    except metadata.PackageNotFoundError:
        return Feature(part.package, None, part.used_for, part.without)
    problem = _problem(part.module) if part.import_it else None
    return Feature(part.package, version, part.used_for, part.without, problem)


@cache
def _problem(module: str) -> str | None:
    """Why the module cannot be imported, in one line; None if it can. A shell package raises RuntimeError, a build
    against other libraries OSError. Tried once a process: forward passes ask for it."""
    try:
        importlib.import_module(module)
    except (ImportError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else module}"
    return None


def doctor_table(more: Sequence[Feature] = ()) -> Table:
    """`features()` and `more` as a table to print with rich."""
    table = Table(title="mrl doctor", title_justify="left")
    for column in ("part", "version", "used for", "without it"):
        table.add_column(column, overflow="fold")
    for f in (*features(), *more):
        version = f.version or "[dim]absent[/dim]"
        if f.problem:
            version = f"[yellow]{f.version}, unusable[/yellow] ({f.problem})"
        table.add_row(f.part, version, f.used_for, f.without)
    return table
