"""Stand-ins for an absent `torch.cuda`: megatron-core uses a CUDA device, streams and events by name."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

from mrl.platform.registry import Stage, adaptation

CPU = torch.device("cpu")
FACTORIES = (
    "arange as_tensor empty empty_like eye full full_like linspace ones ones_like rand randint randn"
    " tensor zeros zeros_like"
).split()


def _no_cuda() -> bool:
    return not torch.cuda.is_available()


@adaptation(
    "no_compile",
    why="megatron decorates functions with torch.compile, which wants a C++ compiler and minutes at the first call",
    stage=Stage.BEFORE_IMPORT,
    needed=_no_cuda,
)
def no_compile() -> None:
    import torch._dynamo.config as dynamo

    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    dynamo.disable = True


@adaptation(
    "current_device",
    why="device=torch.cuda.current_device() at some 80 places",
    stage=Stage.BEFORE_IMPORT,
    needed=_no_cuda,
)
def current_device() -> None:
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.is_available = lambda: False  # with its NVML check it would follow the next line
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None


class NullStream:
    """A stream or event on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: NullStream) -> None: ...
    def wait_event(self, event: NullStream) -> None: ...
    def wait(self, stream: NullStream | None = None) -> None: ...
    def record(self, stream: NullStream | None = None) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: NullStream | None = None) -> NullStream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: NullStream) -> float:
        return 0.0


@adaptation(
    "streams",
    why="side streams, events and synchronisation in the schedules, the optimizer and the MoE dispatcher",
    stage=Stage.BEFORE_IMPORT,
    needed=_no_cuda,
)
def streams() -> None:
    null: Any = NullStream()
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = NullStream
    cuda.current_stream = cuda.default_stream = lambda device=None: null
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None


@adaptation(
    "to_cuda", why="tensor.cuda() and module.cuda() stay where they are", stage=Stage.BEFORE_IMPORT, needed=_no_cuda
)
def to_cuda() -> None:
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]


@adaptation(
    "factories",
    why='torch.zeros(..., device="cuda") and pin_memory=True, written as literals',
    stage=Stage.BEFORE_IMPORT,
    needed=_no_cuda,
)
def factories() -> None:
    # `with torch.device(...)` caches the factories by identity at first use, so it must see the originals
    _device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


@adaptation(
    "tensor_type",
    why="the optimizer compares tensor.type() with 'torch.cuda.FloatTensor' and drops parameters of other types",
    stage=Stage.BEFORE_IMPORT,
    needed=_no_cuda,
)
def tensor_type() -> None:
    original = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        name = original(self)
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]


@adaptation(
    "rng",
    why="the random number tracker saves and restores the CUDA generator; here it is the CPU's",
    stage=Stage.AFTER_IMPORT,
    needed=_no_cuda,
)
def rng() -> None:
    import megatron.core.tensor_parallel.random as random

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        def add(self, name: str, seed: int) -> None:
            if seed in self.seeds_ or name in self.states_:
                raise RuntimeError(f"random state {name} (seed {seed}) already exists")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise RuntimeError(f"random state {name} was never added")
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    random.CudaRNGStatesTracker = CpuRNGStatesTracker
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


@adaptation(
    "uneven_gather",
    why="tensor-parallel experts gather parts of unequal length, which gloo's all_gather refuses",
    stage=Stage.AFTER_IMPORT,
    needed=_no_cuda,
)
def uneven_gather() -> None:
    import megatron.core.tensor_parallel.mappings as mappings

    even = mappings._gather_along_first_dim

    def gather(
        x: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        world = group.size()
        if output_split_sizes is None or world == 1:
            return even(x, group, output_split_sizes, use_global_buffer)
        out = x.new_empty(sum(output_split_sizes), *x.shape[1:])
        to_each = x.contiguous().repeat(world, *[1] * (x.dim() - 1))
        torch.distributed.all_to_all_single(out, to_each, list(output_split_sizes), [x.size(0)] * world, group=group)
        return out

    mappings._gather_along_first_dim = gather
