"""`install()` applies the registered adaptations to this process.

The stand-ins for `torch.cuda` are needed only without CUDA. The fixes of megatron-core are needed only where the fault
is, and each tests for the fault itself; with CUDA and transformer-engine none of them applies. `MRL_PLATFORM_OFF=a,b`
(or `all`) leaves adaptations out, so that a failure can be traced to the adaptation that prevents it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from difflib import get_close_matches

from mrl.platform import (  # noqa: F401  (they fill the registry)
    cpu_matmul,
    gloo,
    kept_memory,
    megatron_fixes,
    megatron_versions,
    torch_cuda,
)
from mrl.platform.fused import check_kernels
from mrl.platform.registry import REGISTRY, Stage

# Read when CUDA starts. One queue keeps a rank's copies and collectives in the order in which they were
# issued, which overlap of tensor and context parallelism requires before Blackwell.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

SWITCHES = ("MRL_PLATFORM_OFF", "MRL_KERNELS")  # variables that a user may set

_applied: list[str] = []
_installed = False


def disabled_adaptations() -> frozenset[str]:
    """Returns the names in MRL_PLATFORM_OFF. Raises ValueError for an unknown adaptation."""
    names = frozenset(filter(None, (n.strip() for n in os.environ.get("MRL_PLATFORM_OFF", "").split(","))))
    unknown = names - REGISTRY.keys() - {"all"}
    if unknown:
        raise ValueError(
            f"MRL_PLATFORM_OFF names unknown {', '.join(sorted(unknown))}; known: all, {', '.join(sorted(REGISTRY))}"
        )
    return frozenset(REGISTRY) if "all" in names else names


def check_switches() -> None:
    """Raises ValueError for an unknown value of MRL_PLATFORM_OFF or MRL_KERNELS, or for a variable that is nearly one
    of these names."""
    disabled_adaptations()
    check_kernels()
    for name in os.environ:
        if (
            name.startswith("MRL_")
            and name not in SWITCHES
            and (near := get_close_matches(name, SWITCHES, cutoff=0.85))
        ):
            raise ValueError(f"{name} in the environment has no effect: did you mean {near[0]}?")


def applied() -> tuple[str, ...]:
    """Returns the adaptations in force in this process, in order of application."""
    return tuple(_applied)


def install() -> None:
    """Makes megatron-core usable here. Call before the first `import megatron.core`; later calls do nothing."""
    global _installed
    if _installed:
        return
    check_switches()
    off = disabled_adaptations()
    _run(Stage.BEFORE_IMPORT, off)
    _import_megatron_quietly()
    _run(Stage.AFTER_IMPORT, off)
    _installed = True


def _run(stage: Stage, off: frozenset[str]) -> None:
    for a in REGISTRY.values():
        if a.stage is stage and a.name not in off and a.needed():
            a.apply()
            _applied.append(a.name)


@contextlib.contextmanager
def _without(package: str) -> Iterator[None]:
    """Hides a package that has not been imported yet, as if it were not installed."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def _import_megatron_quietly() -> None:
    """Imports Megatron without its warnings about absent optional packages, which `mrl doctor` lists.

    wandb is hidden: it takes a second to import and serves only Megatron's own logging.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # that it finds no CUDA to compile with
    with warnings.catch_warnings(), _without("wandb"):
        warnings.simplefilter("ignore")
        import megatron.core.distributed
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel
        import megatron.core.transformer.moe.moe_layer  # noqa: F401
    for module in (r"megatron\..*", r"torch\.jit\..*"):
        for category in (UserWarning, DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=module)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # megatron's calls
    # Messages of every start: the rerun state machine exists, GPTModel will be replaced, DDP computes its own layout.
    for module in ("rerun_state_machine", "models.gpt.gpt_model", "distributed.distributed_data_parallel"):
        logging.getLogger(f"megatron.core.{module}").setLevel(logging.ERROR)
