"""Changes to some sglang modules, applied when sglang imports them (nothing is imported ahead of time)."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from mrl import gloo_loop

from . import batch_invariance, batched_attention, draws, layers, pictures


def _allow_deterministic_torch_native(module: ModuleType) -> None:
    """--enable-deterministic-inference refuses attention backends that it does not list. On CPU all that the flag
    has to do is turn on per-request seeds, which works with any backend; latent attention is refused on backends that
    share no prefixes between requests then, which the server is told not to do."""
    module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    module.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")


def _no_batch_invariant_kernels(module: ModuleType) -> None:
    """The batch-invariant kernels that the same flag installs are triton's."""
    module.enable_batch_invariant_mode = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def _one_gloo_loop(module: ModuleType) -> None:
    """A scheduler has nine of gloo's groups, each with a thread: idle, they take a hundredth of a core together."""
    gloo_loop.share()


def _no_garbage_collection_at_flush(module: ModuleType) -> None:
    """Flushing the prefix cache, part of every weight update, ends with a full garbage collection on CPU: a third of a
    second over all that was imported. torch keeps no cached memory there that it could give back."""
    module.CpuDeviceMixin.empty_cache = lambda self: None


def _fork_instead_of_spawn(module: ModuleType) -> None:
    """A spawned scheduler or detokenizer imports all of sglang again, two thirds of the server's start. Without CUDA
    they can be forked from the process that has it imported, which serves nothing yet: with garbage collected again,
    which never goes over what was imported."""
    stock = multiprocessing.set_start_method

    def set_start_method(method: str | None, force: bool = False) -> None:
        stock("fork", force)
        gc.freeze()
        gc.enable()

    multiprocessing.set_start_method = set_start_method


def _end_when_told(module: ModuleType) -> None:
    """Ends a server as soon as it is told to: SGLang checks every 5 seconds, then lets its processes release GPU
    memory. Here they hold none, and mrl's supervisor ends them."""
    module.SignalHandler.sigterm_handler = lambda *_: os._exit(0)


def _draw_in_one_pass(module: ModuleType) -> None:
    """sglang computes noise for every token of the vocabulary, in float64 and a pass of memory an operation."""

    def multinomial_with_seed(logprobs: Any, seed: Any, positions: Any) -> Any:
        return draws.draw(logprobs.float(), seed, positions)[:, None]

    vars(module)["multinomial_with_seed"] = multinomial_with_seed


class _Unpinned:
    """torch, whose new tensors are in ordinary memory."""

    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch, name)
        if name not in ("tensor", "zeros", "empty"):
            return found
        return lambda *args, pin_memory=False, **settings: found(*args, **settings)


def _no_pinned_memory(module: ModuleType) -> None:
    """Makes the table of each request's adapter in ordinary memory: torch pins memory beside accelerators only."""
    import torch

    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    vars(module)["torch"] = _Unpinned()


def _no_host_registration(module: ModuleType) -> None:
    """Keeps the buffer of routed experts in memory that is not registered with CUDA."""
    vars(module)["_cuda_host_register"] = lambda *_: None


def _absorbed_latent_attention(module: ModuleType) -> None:
    """DeepSeek's attention takes its form by the backend's name. An unknown one gets triton's, a mixture of two."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    module.AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def _any_rope(module: ModuleType) -> None:
    """Selects DeepSeek's rope by config.json: on CPUs SGLang takes yarn's, also where nothing is scaled."""
    stock = module.get_rope_wrapper
    signature = inspect.signature(stock)

    def wrapper(*args: Any, **settings: Any) -> Any:
        given = signature.bind(*args, **settings).arguments
        if given.get("device") != "cpu" or given.get("rope_scaling") is not None:
            return stock(*args, **settings)
        return module.get_rope(**{name: value for name, value in given.items() if name != "device"})

    vars(module)["get_rope_wrapper"] = wrapper


def _gate_in_torch(module: ModuleType) -> None:
    """Gates the output of Qwen2-MoE's shared expert in torch instead of a triton kernel."""

    def gated(hidden: Any, weight: Any, shared: Any) -> Any:
        return (hidden @ weight.reshape(-1, 1)).sigmoid() * shared

    def add_gated(hidden: Any, weight: Any, shared: Any, out: Any) -> None:
        out.add_(gated(hidden, weight, shared))

    vars(module).update(fused_gate_sigmoid_mul=gated, fused_gate_sigmoid_mul_add=add_gated)


ADAPTATIONS: dict[str, Callable[[Any], None]] = {
    "sglang.kernels.ops.elementwise.elementwise": _gate_in_torch,
    "sglang.srt.arg_groups.choices": _allow_deterministic_torch_native,
    "sglang.srt.batch_invariant_ops": _no_batch_invariant_kernels,
    "sglang.srt.distributed.parallel_state": _one_gloo_loop,
    "sglang.srt.entrypoints.engine": _fork_instead_of_spawn,
    "sglang.srt.layers.attention.torch_native_backend": batched_attention.install,
    "sglang.srt.layers.activation": layers.gates_in_one_call,
    "sglang.srt.layers.layernorm": layers.norms_in_one_call,
    "sglang.srt.layers.linear": batch_invariance.install,
    "sglang.srt.layers.rotary_embedding.base": layers.rotations_in_whole_rows,
    "sglang.srt.layers.rotary_embedding.factory": _any_rope,
    "sglang.srt.layers.sampler": _draw_in_one_pass,
    "sglang.srt.lora.backend.torch_backend": _no_pinned_memory,
    "sglang.srt.lora.layers": _no_pinned_memory,
    "sglang.srt.managers.io_struct": pictures.send_arrays,
    "sglang.srt.managers.tokenizer_manager": _end_when_told,
    "sglang.srt.mem_cache.pool_host.common": _no_host_registration,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _absorbed_latent_attention,
    "sglang.srt.multimodal.processors.qwen_vl": pictures.keep_templates,
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
