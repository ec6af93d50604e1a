"""Compares the speed of SFT in mrl and TRL, in tokens per second.

    python tools/bench/sft_vs_trl.py --trl-python /path/to/python [--rounds 3] [--steps 24] [--cores 2]

Both have the same model, rows, loss, precision and machine. TRL packs rows of even lengths and pads uneven ones.
`comparison.py` says how both run and what is timed. Padding does not count as tokens. Both sides must report the same
losses; for packed rows, which TRL reorders, the same mean loss.
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
import sft_workload as rows
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


@dataclass
class Runs:
    """Seconds per token of both sides for each round, with one kind of lengths. tokens: of each step"""

    lengths: str
    tokens: list[int]
    seconds: dict[str, list[Measured]] = field(default_factory=lambda: {side: [] for side in SIDES})
    losses: dict[str, list[float]] = field(default_factory=dict)


def run_both(runs: Runs, python: str, directory: Path, cores: int, number: int) -> Any:
    """Runs a round of both sides; returns the versions on TRL's side."""
    args = (directory, runs.lengths, len(runs.tokens), cores)
    trl, runs.losses["trl"], versions = run_trl(python, "trl_sft.py", args, cores)
    tokens = sum(runs.tokens[WARM_STEPS:])
    runs.seconds["trl"].append({measure: seconds / tokens for measure, seconds in trl.items()})
    config = mrl_config(directory, runs, cores, f"{runs.lengths}_{number}")
    mrl, runs.losses["mrl"] = run_mrl(
        directory, config, "actor/loss", lambda steps: sum(runs.tokens[steps.start : steps.stop])
    )
    runs.seconds["mrl"].append(mrl)
    return versions


def mrl_config(directory: Path, runs: Runs, cores: int, name: str) -> dict[str, Any]:
    most = workload.MODEL["max_position_embeddings"]
    return {
        "trainer": "sft",
        "run": {"root": str(directory), "name": name, "steps": len(runs.tokens), "nproc": cores, "trackers": []},
        "model": {"path": str(directory / "model"), "dtype": "float32"},
        "actor": {
            "optimizer": {"lr": workload.LEARNING_RATE, "beta2": 0.999},
            "max_tokens_per_microbatch": max(runs.tokens) // cores + int(most),
        },
        "data": {
            "train": str(rows.file(directory, runs.lengths)),
            "answer_key": "completion",
            "max_prompt_tokens": workload.PROMPT_TOKENS,
            "max_tokens": most,
            "shuffle": False,
        },
        "batch": {"samples_per_step": rows.ROWS_PER_STEP},
    }


def summary(runs: Runs) -> dict[str, Any]:
    """Returns the tokens per second of both sides, and mrl's relative to TRL's; exits if the losses differ."""
    speeds = per_second(runs.seconds)
    trl, mrl = runs.losses["trl"], runs.losses["mrl"]
    difference = max(abs(a - b) for a, b in zip(trl, mrl, strict=True))
    if runs.lengths == "even":
        difference = abs(statistics.fmean(trl) - statistics.fmean(mrl))
    if difference > LOSS_DIFFERENCE:
        sys.exit(f"{runs.lengths}: the losses differ by {difference:.2g}, more than {LOSS_DIFFERENCE:g}")
    return {"tokens_per_second": speeds, "mrl_over_trl": ratios(speeds), "losses_differ_by": difference}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, default=record.RESULTS / "sft_vs_trl.json")
    args = parser.parse_args()
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        parameters = rows.make(directory, args.steps)
        comparisons = [Runs(kind, rows.tokens_by_step(directory, kind)) for kind in rows.LENGTHS]
        for number in range(args.rounds):
            for runs in comparisons:
                versions = run_both(runs, args.trl_python, directory, args.cores, number)
                print(f"round {number} {runs.lengths:7}", json.dumps(summary(runs)["mrl_over_trl"]), flush=True)
    report = {
        "versions_of_trl": versions,
        "workload": {
            "parameters": parameters,
            "model": workload.MODEL,
            "dtype": "float32",
            "rows_per_step": rows.ROWS_PER_STEP,
            "mean_tokens_per_step": {runs.lengths: round(statistics.fmean(runs.tokens)) for runs in comparisons},
            "trl": {
                "even": f"packed (bfd) to {rows.PACK_TOKENS} tokens, a pack a micro-batch",
                "uneven": f"padded, {rows.PADDED_ROWS} rows a micro-batch",
            },
            "layout": layout(args.cores),
        },
        "rounds": args.rounds,
        "steps_a_run": args.steps,
        "warm_steps_left_out": WARM_STEPS,
        "cases": {runs.lengths: summary(runs) for runs in comparisons},
    }
    record.write(args.output, report)


if __name__ == "__main__":
    main()
