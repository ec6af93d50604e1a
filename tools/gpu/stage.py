"""Runs stages of `make test-gpu`: python -m tools.gpu.stage LINES WORK_DIR [--rehearse] [--leave CHECK]... STAGE...

A stage is a module tools/gpu/stage_NAME.py with CHECKS, a dict from name to function. A check takes a Setting and
returns its numbers. It raises Skipped or Failed with the reason; any other exception counts as a failure too. A line
of JSON goes to the file LINES when a check begins, and one when it ends, so results survive a crash in a later check.

With --rehearse every check uses tiny sizes and runs on a CPU too. Its numbers then have no meaning.
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
    """Raised by a check that cannot run on this machine, with the reason."""


class Failed(Exception):
    """Raised by a check whose result is wrong, with the reason and the numbers."""

    def __init__(self, reason: str, numbers: Numbers | None = None) -> None:
        super().__init__(reason)
        self.numbers = numbers or {}


@dataclass(frozen=True)
class Setting:
    """work: a directory that the checks share. rehearsal: use tiny sizes and require no GPU."""

    work: Path
    rehearsal: bool = False


Check = Callable[[Setting], Numbers]


def require(numbers: Numbers, **limits: float) -> Numbers:
    """Returns the numbers. Raises Failed if a number exceeds its limit or is NaN."""
    excess = [f"{name} {numbers[name]:.3g} > {limit:g}" for name, limit in limits.items() if not numbers[name] <= limit]
    if excess:
        raise Failed("; ".join(excess), numbers)
    return numbers


def checks_of(stage: str) -> dict[str, Check]:
    """Returns the checks of a stage in their order. Raises what the import of the stage's module raises."""
    checks: dict[str, Check] = importlib.import_module(f"tools.gpu.stage_{stage}").CHECKS
    return checks


def run_check(check: Check, setting: Setting) -> dict[str, Any]:
    """Returns the check's verdict, its numbers, and the reason why it was skipped or failed."""
    try:
        return {"verdict": "passed", "numbers": check(setting)}
    except Skipped as skipped:
        return {"verdict": "skipped", "reason": str(skipped)}
    except Failed as failed:
        return {"verdict": "failed", "reason": str(failed)[-REASON_CHARACTERS:], "numbers": failed.numbers}
    except Exception as error:
        traceback.print_exc()
        return {"verdict": "failed", "reason": f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]}


def gpu() -> dict[str, Any]:
    """Describes the GPU as torch and its driver do; empty without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    card, driver = torch.cuda.get_device_properties(0), Path("/proc/driver/nvidia/version")
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", driver.read_text()) if driver.is_file() else None
    return {
        "card": card.name,
        "compute_capability": f"{card.major}.{card.minor}",
        "memory_gib": round(card.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "driver": version.group() if version else "unknown",
    }


def run(stage: str, setting: Setting, write: Callable[[dict[str, Any]], None], leave: Sequence[str] = ()) -> None:
    """Runs the checks of a stage.

    Args:
        write: receives each line
        leave: names of checks to leave out
    """
    checks = {name: check for name, check in checks_of(stage).items() if name not in leave}
    write({"stage": stage, "checks": list(checks), "gpu": gpu()})
    for name, check in checks.items():
        write({"check": name, "verdict": "begun"})
        began = time.monotonic()
        line = {"check": name, **run_check(check, setting)}
        seconds = round(time.monotonic() - began, 1)
        write(line | {"seconds": seconds})
        numbers = ", ".join(f"{name} {_short(value)}" for name, value in line.get("numbers", {}).items())
        details = "; ".join(filter(None, [line.get("reason"), numbers]))
        print(f"  {line['verdict']:8} {line['check']} ({seconds} s)  {details}", flush=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path, help="file of JSON lines that the results are appended to")
    parser.add_argument("work", type=Path, help="directory that the checks share")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes; runs on a CPU too")
    parser.add_argument("--leave", action="append", default=[], metavar="CHECK", help="a check to leave out")
    parser.add_argument("stages", nargs="+", choices=STAGES, metavar="STAGE")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    setting = Setting(args.work.resolve(), args.rehearse)
    with args.lines.open("a", buffering=1) as file:
        for stage in args.stages:
            run(stage, setting, lambda line: print(json.dumps(line), file=file), args.leave)


if __name__ == "__main__":
    from tools.gpu import stage  # not __main__: the stages raise the exceptions of this module

    stage.main()
