"""Differences between the releases of Megatron-Core that mrl runs on: 0.16 (Python 3.11) and 0.19 (Python 3.12).

Each names the release at which it ends or begins. No other module may ask which release is installed: it calls a
function here, or Megatron behaves as 0.16 after the adaptations below. 0.17 and 0.18 are not supported. Families with
gated delta nets need 0.19: `mrl.families.delta_nets` refuses them before anything large is imported.
"""

from __future__ import annotations

import functools
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version

from mrl.platform.registry import Stage, adaptation

# Megatron-Core's release -> transformer-engine's first supported version, and the first unsupported one
_TRANSFORMER_ENGINE = {"0.16": ("2.9", "2.12"), "0.19": ("2.9", "2.21")}


def transformer_engine_range() -> tuple[Version, Version]:
    """Returns the transformer-engine versions for the installed Megatron-Core: first supported, first unsupported."""
    release = ".".join(metadata.version("megatron-core").split(".")[:2])
    first, end = _TRANSFORMER_ENGINE.get(release, _TRANSFORMER_ENGINE["0.16"])
    return Version(first), Version(end)


def submodules(spec: Any) -> Any:
    """Returns the submodules of a layer's MLP, experts or shared experts, to be changed in place.

    Up to 0.16 `spec` is a ModuleSpec; in 0.19 it is a functools.partial that takes them as a keyword.
    """
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def _latent_attention() -> Any:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    return MLASelfAttention


@adaptation(
    "latent_norms",
    why="0.19 refuses a norm of latent attention unless transformer-engine's fused norm and projection are there",
    stage=Stage.AFTER_IMPORT,
    needed=lambda: hasattr(_latent_attention(), "_resolve_qk_norm_config"),
)
def latent_norms() -> None:
    """Builds the norms and projections that the layer spec names, as up to 0.16."""
    names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
    _latent_attention()._resolve_qk_norm_config = lambda self, spec: {name: getattr(spec, name) for name in names}


def _delta_nets() -> Any:
    import megatron.core.ssm.gated_delta_net as delta_nets

    return delta_nets


@adaptation(
    "delta_nets_without_fla",
    why="Megatron builds gated delta nets only with flash-linear-attention; mrl's layer computes the rule in torch",
    stage=Stage.AFTER_IMPORT,
    needed=lambda: hasattr(_delta_nets(), "common") and not _delta_nets().HAVE_FLA,
)
def delta_nets_without_fla() -> None:
    _delta_nets().common.HAVE_FLA = True


@adaptation(
    "storage_pickles",
    why="0.19 replaces the function that pickled tensors name by its own, which an engine without Megatron cannot load",
    stage=Stage.AFTER_IMPORT,
    needed=lambda: torch.storage._load_from_bytes.__module__ != "torch.storage",
)
def storage_pickles() -> None:
    """Gives Megatron's function, which loads plain values only, the name that torch's has in pickles."""
    function: Any = torch.storage._load_from_bytes
    function.__module__, function.__name__, function.__qualname__ = "torch.storage", *2 * ("_load_from_bytes",)
