"""Writes the results of a benchmark with commit, date, machine and versions."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.files import write_atomically
from mrl.packages import commit, versions

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "megatron-core", "safetensors", "sglang", "transformers", "nvidia-resiliency-ext",
            "transformer-engine", "triton", "flashinfer-python", "torch_memory_saver")  # fmt: skip


def write(file: Path, figures: Mapping[str, Any]) -> None:
    """Writes `figures` as JSON after a header with commit, date, machine and versions, atomically."""
    header = {
        "commit": commit() or "not a git checkout",
        "date": time.strftime("%F"),
        "machine": _machine(),
        "versions": versions(*PACKAGES),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps({**header, **figures}, indent=1) + "\n")
    print(f"wrote {file}")


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }
