"""`install()`, which applies the registered adaptations to this process.

The stand-ins for `torch.cuda` are needed only where CUDA is absent. The repairs of megatron-core are needed only where
the fault is, and each looks for the fault itself; with CUDA and transformer-engine there none of them applies.
`MRL_PLATFORM_OFF=a,b` (or `all`) leaves adaptations out, so that a failure can be traced to the one that prevents it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from difflib import get_close_matches

from mrl.platform import cpu_matmul, gloo, kept_memory, megatron_fixes, torch_cuda  # noqa: F401  (they fill the registry)
from mrl.platform.fused import check_kernels
from mrl.platform.registry import REGISTRY, Stage

# Read when a GPU is first asked for. One queue keeps a rank's copies and collectives in the order in which they were
# given, which overlap of tensor and context parallelism counts on before Blackwell.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

SWITCHES = ("MRL_PLATFORM_OFF", "MRL_KERNELS")  # that a user may set

_applied: list[str] = []
_installed = False


def switched_off() -> frozenset[str]:
    """Names in MRL_PLATFORM_OFF. Raises ValueError for a name that is no adaptation."""
    names = frozenset(filter(None, (n.strip() for n in os.environ.get("MRL_PLATFORM_OFF", "").split(","))))
    unknown = names - REGISTRY.keys() - {"all"}
    if unknown:
        raise ValueError(
            f"MRL_PLATFORM_OFF names {', '.join(sorted(unknown))}; known: all, {', '.join(sorted(REGISTRY))}"
        )
    return frozenset(REGISTRY) if "all" in names else names


def check_switches() -> None:
    """Raises ValueError for a word in MRL_PLATFORM_OFF or MRL_KERNELS that means nothing, or a name that is nearly one
    of these."""
    switched_off()
    check_kernels()
    for name in os.environ:
        if (
            name.startswith("MRL_")
            and name not in SWITCHES
            and (near := get_close_matches(name, SWITCHES, cutoff=0.85))
        ):
            raise ValueError(f"{name} in the environment is read by nobody: did you mean {near[0]}?")


def applied() -> tuple[str, ...]:
    """Adaptations in force in this process, in the order in which they were applied."""
    return tuple(_applied)


def install() -> None:
    """Make megatron-core usable here. Call before the first `import megatron.core`; later calls do nothing."""
    global _installed
    if _installed:
        return
    check_switches()
    off = switched_off()
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
    """As if it were not installed, where nobody has imported it yet."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def _import_megatron_quietly() -> None:
    """Megatron warns at import about every optional package that is absent; `mrl doctor` has them in a table. It goes
    without wandb, which takes a second to import and would be for Megatron's own logging."""
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
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)  # says that it exists
