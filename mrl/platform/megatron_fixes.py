"""Fixes of faults in megatron-core that appear without CUDA, transformer-engine or apex.

Each `needed` check tests for the fault itself, so a fix retires when a release no longer has the fault.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import torch

from mrl.platform.fused import transformer_engine_fault
from mrl.platform.registry import Stage, adaptation


def _for_gpus() -> list[str]:
    return [name for name in ("transformer_engine", "apex") if importlib.util.find_spec(name) is not None]


def _hide(package: str) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]  # now an ImportError


@adaptation(
    "te_without_gpu",
    why="megatron takes kernels of transformer-engine and apex wherever they can be imported, and they are for GPUs",
    stage=Stage.BEFORE_IMPORT,
    needed=lambda: not torch.cuda.is_available() and bool(_for_gpus()),
)
def te_without_gpu() -> None:
    for package in _for_gpus():
        _hide(package)


@adaptation(
    "broken_te",
    why="of a transformer-engine whose import fails megatron expects ImportError from every part, or it believes in it",
    stage=Stage.BEFORE_IMPORT,
    needed=lambda: transformer_engine_fault() is not None,
)
def broken_te() -> None:
    _hide("transformer_engine")


def _moe_utils() -> Any:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    return moe_utils


def _random() -> Any:
    import megatron.core.tensor_parallel.random as random

    return random


MOE_NAMES = ("te_general_gemm", "fused_permute", "fused_unpermute")


@adaptation(
    "moe_names",
    why="without transformer-engine the MoE router raises NameError: names are bound only if its import succeeds",
    stage=Stage.AFTER_IMPORT,
    needed=lambda: not all(hasattr(_moe_utils(), name) for name in MOE_NAMES),
)
def moe_names() -> None:
    for name in MOE_NAMES:
        if not hasattr(_moe_utils(), name):
            setattr(_moe_utils(), name, None)


def _splits_stay_tensors() -> bool:
    if torch.cuda.is_available():
        return False
    return torch.is_tensor(_moe_utils().maybe_move_tensor_to_cpu(torch.zeros(1), as_numpy=True))


@adaptation(
    "moe_splits",
    why="the MoE dispatcher turns split sizes into numpy only if they were on a GPU; all_to_all wants integers",
    stage=Stage.AFTER_IMPORT,
    needed=_splits_stay_tensors,
)
def moe_splits() -> None:
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    _moe_utils().maybe_move_tensor_to_cpu = on_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = on_cpu


@adaptation(
    "recompute_names",
    why="without transformer-engine selective recomputation of norms raises NameError (FP8GlobalStateManager)",
    stage=Stage.AFTER_IMPORT,
    needed=lambda: not hasattr(_random(), "FP8GlobalStateManager"),
)
def recompute_names() -> None:
    _random().FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    _random().activation_recompute_forward = lambda *args, **kwargs: contextlib.nullcontext()
    _random().fp8_autocast = lambda *args, **kwargs: contextlib.nullcontext()


def _latent_attention() -> Any:
    import megatron.core.transformer.multi_latent_attention as latent_attention

    return latent_attention


@adaptation(
    "latent_te",
    why="without transformer-engine MLA believes that it is there, and asks whether a layer is an instance of None",
    stage=Stage.AFTER_IMPORT,
    needed=lambda: _latent_attention().HAVE_TE and not isinstance(_latent_attention().TELinear, type),
)
def latent_te() -> None:
    _latent_attention().HAVE_TE = False


def _distributed_optimizer() -> Any:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return DistributedOptimizer


def _adam_step_is_asked_for() -> bool:
    """True if loading a state without `step`, as megatron saves it, into torch's Adam fails."""
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    if HAVE_APEX_OR_TE:
        return False
    param = torch.zeros(1)
    optimizer = SimpleNamespace(param_groups=[{"params": [param]}], state={param: {"step": torch.zeros(1)}})
    holder = SimpleNamespace(
        model_param_group_index_map={param: (0, 0)},
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        optimizer=optimizer,
    )
    try:
        _distributed_optimizer()._set_main_param_and_optimizer_states(holder, param, {"param": torch.zeros(1)})
    except KeyError:
        return True
    return False


@adaptation(
    "adam_step",
    why="the distributed optimizer leaves torch Adam's `step` out of a checkpoint and asks for it when it loads one",
    stage=Stage.AFTER_IMPORT,
    needed=_adam_step_is_asked_for,
)
def adam_step() -> None:
    cls = _distributed_optimizer()
    original = cls._set_main_param_and_optimizer_states

    def with_step(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, index = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        original(self, model_param, {"step": state["step"], **tensors} if "step" in state else tensors)

    cls._set_main_param_and_optimizer_states = with_step


def _parts_without_parameters_fail() -> bool:
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    return not HAVE_APEX_OR_TE


@adaptation(
    "empty_adam",
    why="a stage without experts has no parameter in the experts' part of the optimizer, and so no step to tell",
    stage=Stage.AFTER_IMPORT,
    needed=_parts_without_parameters_fail,
)
def empty_adam() -> None:
    cls = _distributed_optimizer()
    original = cls.state_dict

    def of_none(self: Any) -> Any:
        groups = self.optimizer.param_groups
        if any(group["params"] for group in groups):
            return original(self)
        return {"optimizer": {"param_groups": [{**group, "params": [], "step": 0.0} for group in groups]}}

    cls.state_dict = of_none


def _clip_grads() -> Any:
    import megatron.core.optimizer.clip_grads as clip_grads

    return clip_grads


def _norm_waits_for_the_gpu() -> bool:
    from megatron.core.utils import local_multi_tensor_l2_norm

    return torch.cuda.is_available() and _clip_grads().l2_norm_impl is local_multi_tensor_l2_norm


@adaptation(
    "grad_norm",
    why="without transformer-engine and apex the gradient norm waits for the GPU once a parameter",
    stage=Stage.AFTER_IMPORT,
    needed=_norm_waits_for_the_gpu,
)
def grad_norm() -> None:
    _clip_grads().l2_norm_impl = norm_of_all


def norm_of_all(chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], *args: Any) -> Any:
    """Returns ([1] float32 norm over all tensors, on their device; None), like amp_C.multi_tensor_l2norm."""
    norms = [norm for tensors in tensor_lists for norm in torch._foreach_norm(tensors)]
    return torch.linalg.vector_norm(torch.stack(norms).float()).view(1), None
