"""Tests mrl on this machine's GPU: `make test-gpu`, or python -m tools.gpu.run [--stages cuda,engine]

Runs the stages one after the other, each in its own process with a time-out, in at most 10 minutes: cuda (without
transformer-engine), engine (SGLang, or mrl's own engine, on the same GPU), transformer_engine, fp8, speed. The stages
trainers (2 minutes more), ranks (5) and real (3) run only if named. Every check prints its verdict. A crash in one
stage does not affect the others.

Each stage that ends writes a file to tools/gpu/results. Commit these files: python -m tools.gpu.support generates a
column of docs/support.md from them. --again runs only the checks that have not passed according to these files.

Exit code: 0 if no check failed, 1 if one did, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.bench import record
from tools.gpu.stage import ROOT, STAGES
from tools.gpu.trained import environment

RESULTS = Path(__file__).parent / "results"
LIMITS_S = {"cuda": 210.0, "engine": 160.0, "transformer_engine": 80.0, "fp8": 79.0, "speed": 70.0, "trainers": 120.0,
            "ranks": 300.0, "real": 200.0}  # fmt: skip
ONLY_IF_NAMED = ("trainers", "ranks", "real")
DEFAULT_STAGES = tuple(stage for stage in STAGES if stage not in ONLY_IF_NAMED)
TIMED_OUT = " s were over"  # end of the reason of a check during which its stage timed out: it may be slow, or hang
ORIGIN_KEYS = ("commit", "date", "card")  # recorded with each check that --again keeps
NO_GPU = 2


@dataclass
class Outcome:
    """Results of a stage. The check during which its process died has failed; the later ones are "not run"."""

    stage: str
    seconds: float = 0.0
    gpu: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        verdicts = {check["verdict"] for check in self.checks}
        return next((verdict for verdict in ("failed", "not run", "passed") if verdict in verdicts), "skipped")


def run_stage(stage: str, command: Sequence[str], lines: Path, limit_s: float) -> Outcome:
    """Runs the command, kills it after `limit_s` seconds, and reads the file `lines` that tools/gpu/stage.py writes."""
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(limit_s)
        end = f"the stage ended with exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    except subprocess.TimeoutExpired:
        end = f"the stage's {limit_s:g}{TIMED_OUT}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return read_lines(stage, lines, end, time.monotonic() - began)


def read_lines(stage: str, lines: Path, end: str, seconds: float) -> Outcome:
    """Reads a stage's lines.

    Args:
        end: how the stage's process ended; the reason of the check that it had begun and not finished
    """
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    head = rows[0] if rows else {"checks": ["start"], "gpu": {}}
    last = {row["check"]: row for row in rows[1:]} if rows else {"start": {"check": "start", "verdict": "begun"}}
    checks = [last.get(name, {"check": name, "verdict": "not run", "reason": end}) for name in head["checks"]]
    for i, check in enumerate(checks):
        if check["verdict"] == "begun":
            checks[i] = {"check": check["check"], "verdict": "failed", "reason": end}
    return Outcome(stage, round(seconds, 1), head["gpu"], checks)


def write(outcome: Outcome, results: Path, commit: str | None, kept: Sequence[dict[str, Any]]) -> None:
    """Writes a stage's file. kept: checks of an earlier run that were not run again"""
    figures = {"commit": commit} if commit else {}
    outcome = replace(outcome, checks=[*kept, *outcome.checks])
    figures |= {"stage": outcome.stage, "verdict": outcome.verdict, "seconds": outcome.seconds, **outcome.gpu}
    record.write(results / f"{outcome.stage}.json", {**figures, "checks": outcome.checks})


def passed(stage: str, results: Path) -> list[dict[str, Any]]:
    """Returns the checks that have passed in the stage's file, each with the commit, date and card of that run."""
    file = results / f"{stage}.json"
    last = json.loads(file.read_text()) if file.exists() else {"checks": []}
    origin = {key: last[key] for key in ORIGIN_KEYS if key in last}
    return [{"of": origin, **check} for check in last["checks"] if check["verdict"] == "passed"]


def summary(outcome: Outcome) -> str:
    verdicts = [check["verdict"] for check in outcome.checks]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in ("passed", "failed", "skipped", "not run")
              if verdict in verdicts]  # fmt: skip
    lines = [f"{outcome.stage}: {outcome.verdict} ({outcome.seconds:.0f} s; {', '.join(counts)})"]
    for check in outcome.checks:
        if check["verdict"] in ("failed", "not run"):
            lines.append(f"  {check['verdict']}: {check['check']}: {check.get('reason')}")
    return "\n".join(lines)


def stage_names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in STAGES]:
        raise argparse.ArgumentTypeError(f"unknown stage {', '.join(unknown)}; stages are {', '.join(STAGES)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages_help = f"stages to run, of {','.join(STAGES)} (default: all but {', '.join(ONLY_IF_NAMED)})"
    parser.add_argument("--stages", type=stage_names, default=list(DEFAULT_STAGES), help=stages_help)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the result files")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "test_gpu", help="directory of the runs, kept")
    parser.add_argument("--commit", help="commit to record, if this is not a git checkout")
    again_help = "run only checks that have not passed; the result file keeps the others"
    parser.add_argument("--again", action="store_true", help=again_help)
    args = parser.parse_args(argv)
    from mrl import platform

    if not platform.gpu_count():
        print("make test-gpu: torch sees no GPU (torch.cuda.is_available() is false); run `mrl doctor`")
        return NO_GPU
    outcomes: list[Outcome] = []
    work = args.work.resolve() / time.strftime("%Y%m%d_%H%M%S")
    work.mkdir(parents=True)
    for stage in args.stages:
        print(f"== {stage}, at most {LIMITS_S[stage]:g} s", flush=True)
        lines = work / f"{stage}.jsonl"
        kept = passed(stage, args.results) if args.again else []
        leave = [argument for check in kept for argument in ("--leave", check["check"])]
        command = [sys.executable, "-m", "tools.gpu.stage", *leave, str(lines), str(work), stage]
        outcomes.append(run_stage(stage, command, lines, LIMITS_S[stage]))
        write(outcomes[-1], args.results, args.commit, kept)
    print("\n" + "\n".join(map(summary, outcomes)))
    return int(any(outcome.verdict in ("failed", "not run") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
