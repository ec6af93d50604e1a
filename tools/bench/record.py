"""What every benchmark writes beside its figures: of which commit, when, where, with which versions."""

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
    """`figures` under a header that says what they were measured on; the load is that at the end. By rename."""
    header = {
        "commit": commit() or "not a git checkout",
        "date": time.strftime("%F"),
        "machine": _machine(),
        "versions": versions(*PACKAGES),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps({**header, **figures}, indent=1) + "\n")
    print(f"written to {file}")


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
