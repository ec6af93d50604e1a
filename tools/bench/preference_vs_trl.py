"""Compares the speed of preference learning in mrl and TRL, in pairs per second.

    python tools/bench/preference_vs_trl.py --trl-python /path/to/python [--rounds 3] [--steps 24] [--cores 2]
        [--only NAME ...]

Both have the same model, pairs, loss, precision and machine, and must report the same losses. `comparison.py` says how
both run and what is timed.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import preference_workload as workload
from comparison import (
    LOSS_DIFFERENCE,
    ROOT,
    SIDES,
    WARM_STEPS,
    Measured,
    arguments,
    layout,
    per_second,
    ratios,
    run_mrl,
    run_trl,
)

sys.path.insert(0, str(ROOT))

from tools.bench import record  # noqa: E402


@dataclass(frozen=True)
class Case:
    """A comparison.

    trl: a name of trl_preference.TRAINERS, and options. mrl: configuration besides `mrl_config`. loss: the metric that
    equals TRL's loss. model: directory of the workload.
    """

    name: str
    what: str
    trl: tuple[str, ...]
    mrl: dict[str, Any]
    loss: str = "actor/loss"
    model: str = "model"


DPO = {"trainer": "dpo", "preference": {"loss": {"sigmoid": {"beta": workload.BETA}}}}
FROZEN, CACHED = (DPO | {"ref": {"policy": policy}} for policy in ("frozen", "cached"))
REWARD = {"trainer": "reward_model", "reward_model": {"center_rewards_coefficient": workload.CENTRING}}
CASES = (
    Case("dpo", "DPO, the reference computed in every step", ("dpo",), FROZEN),
    Case("dpo_cached", "DPO, the reference computed before the first step", ("dpo", "--cached"), CACHED),
    Case("reward", "A reward model, Bradley-Terry with centring", ("reward",), REWARD, model="judge"),
)


@dataclass
class Runs:
    """Seconds per pair of both sides for each round, of a case with one kind of lengths."""

    case: Case
    lengths: str
    pairs: dict[str, list[Measured]] = field(default_factory=lambda: {side: [] for side in SIDES})
    losses: dict[str, list[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.case.name}_{self.lengths}"


def run_both(runs: Runs, python: str, directory: Path, steps: int, cores: int, number: int) -> Any:
    """Runs a round of both sides; returns the versions on TRL's side."""
    name, *options = runs.case.trl
    args = (directory, name, runs.lengths, steps, cores, *options)
    trl, runs.losses["trl"], versions = run_trl(python, "trl_preference.py", args, cores)
    pairs = (steps - WARM_STEPS) * workload.PAIRS_PER_STEP
    runs.pairs["trl"].append({measure: seconds / pairs for measure, seconds in trl.items()})
    config = mrl_config(directory, runs, steps, cores, f"{runs.name}_{number}")
    mrl, runs.losses["mrl"] = run_mrl(
        directory, config, runs.case.loss, lambda steps: len(steps) * workload.PAIRS_PER_STEP
    )
    runs.pairs["mrl"].append(mrl)
    return versions


def mrl_config(directory: Path, runs: Runs, steps: int, cores: int, name: str) -> dict[str, Any]:
    longest = max(workload.tokens_by_step(directory, runs.lengths))
    most = workload.MODEL["max_position_embeddings"]
    return {
        "run": {"root": str(directory), "name": name, "steps": steps, "nproc": cores, "trackers": []},
        "model": {"path": str(directory / runs.case.model), "dtype": "float32"},
        "actor": {
            "optimizer": {"lr": workload.LEARNING_RATE, "beta2": 0.999},
            "max_tokens_per_microbatch": longest // cores + 2 * int(most),
        },
        "data": {
            "train": str(directory / f"{runs.lengths}.jsonl"),
            "max_prompt_tokens": workload.PROMPT_TOKENS,
            "max_tokens": most,
            "shuffle": False,
        },
        "batch": {"rows_per_step": workload.PAIRS_PER_STEP},
        **runs.case.mrl,
    }


def summary(runs: Runs) -> dict[str, Any]:
    """Returns the pairs per second of both sides, and mrl's relative to TRL's; exits if the losses differ."""
    speeds = per_second(runs.pairs, 2)
    difference = max(abs(a - b) for a, b in zip(runs.losses["trl"], runs.losses["mrl"], strict=True))
    if difference > LOSS_DIFFERENCE:
        sys.exit(f"{runs.name}: the losses of a step differ by {difference:.2g}, more than {LOSS_DIFFERENCE:g}")
    return {
        "what": runs.case.what,
        "pairs_per_second": speeds,
        "mrl_over_trl": ratios(speeds),
        "losses_differ_by": difference,
    }


def main() -> None:
    names = [case.name for case in CASES]
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--output", type=Path, default=record.RESULTS / "preference_vs_trl.json")
    args = parser.parse_args()
    comparisons = [Runs(case, lengths) for case in CASES if case.name in args.only for lengths in ("even", "uneven")]
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        parameters = workload.make(directory, args.steps)
        tokens = {kind: workload.tokens_by_step(directory, kind) for kind in ("even", "uneven")}
        for number in range(args.rounds):
            for runs in comparisons:
                versions = run_both(runs, args.trl_python, directory, args.steps, args.cores, number)
                print(f"round {number} {runs.name:18}", json.dumps(summary(runs)["mrl_over_trl"]), flush=True)
            report = {  # written after every round, in case the program is interrupted
                "versions_of_trl": versions,
                "workload": {
                    "parameters": parameters,
                    "model": workload.MODEL,
                    "dtype": "float32",
                    "pairs_per_step": workload.PAIRS_PER_STEP,
                    "mean_tokens_per_step": {kind: round(statistics.fmean(each)) for kind, each in tokens.items()},
                    "layout": layout(args.cores),
                },
                "rounds": number + 1,
                "steps_a_run": args.steps,
                "warm_steps_left_out": WARM_STEPS,
                "cases": {runs.name: summary(runs) for runs in comparisons},
            }
            record.write(args.output, report)


if __name__ == "__main__":
    main()
