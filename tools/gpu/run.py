"""Whether mrl works on this machine's GPU: `make test-gpu`, or python -m tools.gpu.run [--stages cuda,engine]

Runs stages one after the other, each in a process of its own with a time-out, all within 10 minutes: cuda (without
transformer-engine), engine (SGLang, or mrl's own, on the same GPU), transformer_engine, fp8, speed. trainers (2 minutes
more), ranks (5) and real (3) run only if named. Every check prints its verdict; what a stage lacks, or dies of,
hides nothing of another. A file a stage goes to tools/gpu/results, to be committed: docs/support.md is made of them by
python -m tools.gpu.support. Nothing is written before a stage is over. --again makes the checks alone that have not
passed there.

Exit code: 0 if nothing failed, 1 if something did, 2 without a GPU.
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
IF_NAMED = ("trainers", "ranks", "real")
USUAL = tuple(stage for stage in STAGES if stage not in IF_NAMED)
OVER = " s were over"  # a stage that was cut off: whether its check hangs is not known
OF_A_CHECK = ("commit", "date", "card")
NO_GPU = 2


@dataclass
class Outcome:
    """What a stage's process has left. A check that it died in has failed; those after it are not run."""

    stage: str
    seconds: float = 0.0
    gpu: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        found = {check["verdict"] for check in self.checks}
        return next((verdict for verdict in ("failed", "not run", "passed") if verdict in found), "skipped")


def run_stage(stage: str, command: Sequence[str], lines: Path, limit_s: float) -> Outcome:
    """Runs the command, which writes `lines` as tools/gpu/stage.py says, to its end or that of its time."""
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(limit_s)
        end = f"the stage ended with exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    except subprocess.TimeoutExpired:
        end = f"the stage's {limit_s:g}{OVER}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return outcome(stage, lines, end, time.monotonic() - began)


def outcome(stage: str, lines: Path, end: str, seconds: float) -> Outcome:
    """end: how its process ended, for the check that it was at"""
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    head = rows[0] if rows else {"checks": ["start"], "gpu": {}}
    made = {row["check"]: row for row in rows[1:]} if rows else {"start": {"check": "start", "verdict": "begun"}}
    for name, row in made.items():
        if row["verdict"] == "begun":
            made[name] = {"check": name, "verdict": "failed", "reason": end}
    nothing = {"verdict": "not run", "reason": end}
    checks = [made.get(name, {"check": name, **nothing}) for name in head["checks"]]
    return Outcome(stage, round(seconds, 1), head["gpu"], checks)


def written(found: Outcome, results: Path, commit: str | None, kept: Sequence[dict[str, Any]] = ()) -> None:
    """kept: checks of an earlier run that were not made again"""
    figures = {"commit": commit} if commit else {}
    found = replace(found, checks=[*kept, *found.checks])
    figures |= {"stage": found.stage, "verdict": found.verdict, "seconds": found.seconds, **found.gpu}
    record.write(results / f"{found.stage}.json", {**figures, "checks": found.checks})


def passed(stage: str, results: Path) -> list[dict[str, Any]]:
    """The stage's checks that have passed there, each with what it passed on: commit, date and card."""
    file = results / f"{stage}.json"
    last = json.loads(file.read_text()) if file.exists() else {"checks": []}
    own = {key: last[key] for key in OF_A_CHECK if key in last}
    return [{"of": own, **check} for check in last["checks"] if check["verdict"] == "passed"]


def shown(found: Outcome) -> str:
    counts = {verdict: sum(check["verdict"] == verdict for check in found.checks) for verdict in
              ("passed", "failed", "skipped", "not run")}  # fmt: skip
    amounts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    lost = [check for check in found.checks if check["verdict"] in ("failed", "not run")]
    text = f"{found.stage}: {found.verdict} ({found.seconds:.0f} s; {amounts})"
    return "\n".join([text, *(f"  {check['verdict']}: {check['check']}: {check.get('reason')}" for check in lost)])


def chosen(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in STAGES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: stages are {', '.join(STAGES)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = f"of {','.join(STAGES)} (default: all but {', '.join(IF_NAMED)})"
    parser.add_argument("--stages", type=chosen, default=list(USUAL), help=usual)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the files go")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "test_gpu", help="where the runs are, and stay")
    parser.add_argument("--commit", help="of a copy that is no git checkout")
    parser.add_argument("--again", action="store_true", help="only what has not passed; the file keeps the rest")
    args = parser.parse_args(argv)
    from mrl import platform

    if not platform.gpu_count():
        print(
            "make test-gpu: torch sees no GPU here (torch.cuda.is_available), so there is nothing to test: `mrl doctor`"
        )
        return NO_GPU
    found: list[Outcome] = []
    work = args.work.resolve() / time.strftime("%Y%m%d_%H%M%S")
    work.mkdir(parents=True)
    for stage in args.stages:
        print(f"== {stage}, at most {LIMITS_S[stage]:g} s", flush=True)
        lines = work / f"{stage}.jsonl"
        kept = passed(stage, args.results) if args.again else []
        left = [word for check in kept for word in ("--leave", check["check"])]
        command = [sys.executable, "-m", "tools.gpu.stage", *left, str(lines), str(work), stage]
        found.append(run_stage(stage, command, lines, LIMITS_S[stage]))
        written(found[-1], args.results, args.commit, kept)
    print("\n" + "\n".join(map(shown, found)))
    return int(any(one.verdict in ("failed", "not run") for one in found))


if __name__ == "__main__":
    sys.exit(main())
