"""Stand-ins for packages that sglang imports at module level. They import; calling into one raises.

The finder sits last on sys.meta_path, so a package that is really installed always wins. But two are to be absent:
sglang's debugging imports megatron, which takes seconds, and that wandb, which fails with a stand-in for IPython.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VERSIONS = {"triton": "3.0.0", "sgl_kernel": "0.0.0"}
UNUSED = (
    "torchvision",
    "IPython",
    "soundfile",
    "gguf",
    "sentencepiece",
    "compressed_tensors",
    "partial_json_parser",
    "jsonschema",
)
ABSENT = ("megatron", "wandb")
ROOTS = {**VERSIONS, **dict.fromkeys(UNUSED, "0.0.0")}


class MissingKernel:
    """A kernel definition that parsed. Launching or calling it is an error that names it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.arg_names: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"triton kernel {self.__name__}: this engine runs on CPU without triton")

    def __getitem__(self, grid: Any) -> Any:
        return self


def kernel_decorator(*args: Any, **kwargs: Any) -> Any:
    """@triton.jit, @triton.autotune(...), @triton.heuristics(...), bare or with arguments."""
    if len(args) == 1 and not kwargs and callable(args[0]):
        return args[0] if isinstance(args[0], MissingKernel) else MissingKernel(args[0])
    return kernel_decorator


class _NameOnly(type):
    """A class whose every attribute is its own name: enough for enum members read at import time."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def _name_only_class(name: str) -> type:
    return _NameOnly(name, (), {"__init__": lambda self, *args, **kwargs: None})


class StubModule(ModuleType):
    """Any attribute exists: capitalised names are classes, the others are modules, which are callable as decorators."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, StubFinder, is_package=True)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "active":  # triton.runtime.driver.active: how sglang asks whether triton can run
            raise RuntimeError("0 active drivers")
        value = self._make(name)
        setattr(self, name, value)
        return value

    def _make(self, name: str) -> Any:
        if name in ("jit", "autotune", "heuristics"):
            return kernel_decorator
        if name[0].isupper() or name in ("constexpr", "dtype"):
            return _name_only_class(name)
        full = f"{self.__name__}.{name}"
        return sys.modules.setdefault(full, StubModule(full))

    def __call__(self, *args: Any, **kwargs: Any) -> StubModule:
        return self


class StubFinder:
    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in ROOTS:
            return None
        return ModuleSpec(name, cls, is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        if spec.name == "sgl_kernel":
            from . import kernels

            return kernels.as_module(spec.name)
        return StubModule(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        if module.__name__ in ROOTS:
            module.__dict__["__version__"] = ROOTS[module.__name__]
        if module.__name__ == "triton":
            module.__dict__["cdiv"] = lambda a, b: -(a // -b)
            module.__dict__["next_power_of_2"] = lambda n: 1 << max(n - 1, 0).bit_length()


def install() -> None:
    sys.meta_path.append(StubFinder)
    for name in ABSENT:
        sys.modules[name] = None  # type: ignore[assignment]  # an ImportError, which is expected there
