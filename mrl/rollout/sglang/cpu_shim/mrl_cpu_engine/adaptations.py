"""Changes to five sglang modules, applied when sglang imports them (nothing is imported ahead of time)."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from . import batched_attention


def _allow_deterministic_torch_native(module: ModuleType) -> None:
    """--enable-deterministic-inference refuses attention backends that it does not list. On CPU all that the flag
    has to do is turn on per-request seeds, which works with any backend."""
    module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _no_batch_invariant_kernels(module: ModuleType) -> None:
    """The batch-invariant kernels that the same flag installs are triton's."""
    module.enable_batch_invariant_mode = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def _no_garbage_collection_at_flush(module: ModuleType) -> None:
    """Flushing the prefix cache, part of every weight update, ends with a full garbage collection on CPU: a third of a
    second over all that was imported. torch keeps no cached memory there that it could give back."""
    module.CpuDeviceMixin.empty_cache = lambda self: None


def _fork_instead_of_spawn(module: ModuleType) -> None:
    """A spawned scheduler or detokenizer imports all of sglang again, two thirds of the server's start. Without CUDA
    they can be forked from the process that has it imported, which serves nothing yet."""
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force)


ADAPTATIONS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.arg_groups.choices": _allow_deterministic_torch_native,
    "sglang.srt.batch_invariant_ops": _no_batch_invariant_kernels,
    "sglang.srt.entrypoints.engine": _fork_instead_of_spawn,
    "sglang.srt.layers.attention.torch_native_backend": batched_attention.install,
    "sglang.srt.platforms.cpu": _no_garbage_collection_at_flush,
}


class AfterImport:
    """Finds a module the usual way and runs its adaptation once the module has been executed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        adapt = ADAPTATIONS.get(name)
        spec = PathFinder.find_spec(name, path) if adapt else None
        if adapt is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_adapt(module: ModuleType) -> None:
            execute(module)
            adapt(module)

        spec.loader.exec_module = execute_and_adapt  # type: ignore[method-assign]
        return spec


def install() -> None:
    sys.meta_path.insert(0, AfterImport)
