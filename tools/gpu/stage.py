"""Stages of `make test-gpu`: python -m tools.gpu.stage LINES WORK_DIR [--rehearse] [--leave CHECK]... STAGE...

A stage is a module tools/gpu/stage_NAME.py with CHECKS, {name: function}. A check is given a Setting and returns its
numbers; it raises Skipped or Failed with the reason, and whatever else it raises is a failure too. A line of JSON goes
to LINES_FILE when a check begins, and one when it ends, so that what was found outlives a crash in a later one.

With --rehearse everything is as small as it can be and runs on a CPU too; numbers then mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("cuda", "engine", "transformer_engine", "fp8", "trainers", "ranks", "real", "speed")
REASON_CHARACTERS = 600

Numbers = dict[str, Any]


class Skipped(Exception):
    """The check cannot be made here; why."""


class Failed(Exception):
    """What was found is wrong; why, with the numbers."""

    def __init__(self, reason: str, numbers: Numbers | None = None) -> None:
        super().__init__(reason)
        self.numbers = numbers or {}


@dataclass(frozen=True)
class Setting:
    """work: a directory for what checks leave to each other. rehearsal: sizes are tiny, and a GPU is not asked for."""

    work: Path
    rehearsal: bool = False


Check = Callable[[Setting], Numbers]


def require(numbers: Numbers, **limits: float) -> Numbers:
    """The numbers, if each that is named is at most its limit (and not NaN). Raises Failed."""
    beyond = [f"{name} {numbers[name]:.3g} > {limit:g}" for name, limit in limits.items() if not numbers[name] <= limit]
    if beyond:
        raise Failed("; ".join(beyond), numbers)
    return numbers


def checks_of(stage: str) -> dict[str, Check]:
    """In their order. ImportError, or whatever else the module's import raises."""
    found: dict[str, Check] = importlib.import_module(f"tools.gpu.stage_{stage}").CHECKS
    return found


def made(check: Check, setting: Setting) -> dict[str, Any]:
    """A check's verdict, its numbers and its reason."""
    try:
        return {"verdict": "passed", "numbers": check(setting)}
    except Skipped as why:
        return {"verdict": "skipped", "reason": str(why)}
    except Failed as why:
        return {"verdict": "failed", "reason": str(why)[-REASON_CHARACTERS:], "numbers": why.numbers}
    except Exception as error:
        traceback.print_exc()
        return {"verdict": "failed", "reason": f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]}


def gpu() -> dict[str, Any]:
    """The card, as torch and the driver name it; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    card, driver = torch.cuda.get_device_properties(0), Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", driver.read_text()) if driver.is_file() else None
    return {
        "card": card.name,
        "compute_capability": f"{card.major}.{card.minor}",
        "memory_gib": round(card.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "driver": found.group() if found else "unknown",
    }


def run(stage: str, setting: Setting, note: Callable[[dict[str, Any]], None], leave: Sequence[str] = ()) -> None:
    """note: takes each line; leave: checks that are not made"""
    checks = {name: check for name, check in checks_of(stage).items() if name not in leave}
    note({"stage": stage, "checks": list(checks), "gpu": gpu()})
    for name, check in checks.items():
        note({"check": name, "verdict": "begun"})
        began = time.monotonic()
        line = {"check": name, **made(check, setting)}
        note(line | {"seconds": round(time.monotonic() - began, 1)})
        print(shown(line, time.monotonic() - began), flush=True)


def shown(line: dict[str, Any], seconds: float) -> str:
    """For the terminal."""
    numbers = ", ".join(f"{name} {_short(value)}" for name, value in line.get("numbers", {}).items())
    said = "; ".join(filter(None, [line.get("reason"), numbers]))
    return f"  {line['verdict']:8} {line['check']} ({seconds:.1f} s)  {said}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--leave", action="append", default=[], metavar="CHECK")
    parser.add_argument("stages", nargs="+", choices=STAGES, metavar="STAGE")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    setting = Setting(args.work.resolve(), args.rehearse)
    with args.lines.open("a", buffering=1) as file:
        for stage in args.stages:
            run(stage, setting, lambda line: print(json.dumps(line), file=file), args.leave)


if __name__ == "__main__":
    from tools.gpu import stage  # the module that the stages know, whose exceptions they raise

    stage.main()
