"""Writes the learning curves of the agents' quickstarts from finished runs, as JSON and as a picture.

    for name in agent agent_bounded agent_endpoint; do python tools/quickstart.py $name; done
    python tools/bench/agent_curves.py [--runs runs/quickstart_agent,runs/quickstart_agent_bounded,...]

Writes tools/bench/results/agent_curves.json and docs/agent_curves.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench import record  # noqa: E402

RUNS = ",".join(f"runs/quickstart_agent{kind}" for kind in ("", "_bounded", "_endpoint"))
GOAL, AVERAGED_STEPS = 0.95, 10  # the goal is a mean reward over so many steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=RUNS)
    folders = [ROOT / folder for folder in parser.parse_args().runs.split(",")]
    results = {folder.name: figures(folder) for folder in folders}
    for name, numbers in results.items():
        print(name, {key: value for key, value in numbers.items() if key != "reward_mean"})
    record.write(
        record.RESULTS / "agent_curves.json", {"goal": GOAL, "mean_over_steps": AVERAGED_STEPS, "runs": results}
    )
    plot(ROOT / "docs" / "agent_curves.png", {name: each["reward_mean"] for name, each in results.items()})


def figures(run_dir: Path) -> dict[str, Any]:
    """Returns the numbers of a run. seconds: wall time from the end of the first step to the end of the last"""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"]]
    rewards = [row["reward/mean"] for row in steps]
    cfg = yaml.safe_load((run_dir / "config.yaml").read_text())
    reached = [
        at + 1
        for at in range(AVERAGED_STEPS - 1, len(rewards))
        if statistics.fmean(rewards[at - AVERAGED_STEPS + 1 : at + 1]) >= GOAL
    ]
    return {
        "parallel": cfg["actor"]["parallel"],
        "batch": cfg["batch"],
        "steps": len(steps),
        "seconds": round(steps[-1]["unix_time"] - steps[0]["unix_time"], 1),
        "first_step_at_goal": reached[0] if reached else None,
        "last": round(statistics.fmean(rewards[-AVERAGED_STEPS:]), 4),
        "greedy": {row["step"]: round(row["validation/mean"], 4) for row in rows if "validation/mean" in row},
        "staleness_max": max(row.get("staleness/max", 0) for row in steps),
        "reward_mean": [round(reward, 4) for reward in rewards],
    }


def plot(file: Path, curves: dict[str, list[float]]) -> None:
    """Plots each step's share of won games as a dot, and the running mean as a line."""
    from matplotlib.figure import Figure

    from mrl.observe.curves import PALETTE

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for colour, (name, rewards) in zip(PALETTE, curves.items(), strict=False):
        steps = range(1, len(rewards) + 1)
        smooth = [statistics.fmean(rewards[max(0, at - AVERAGED_STEPS) : at]) for at in steps]
        axes.plot(steps, rewards, ".", color=colour, alpha=0.25, markersize=3)
        axes.plot(steps, smooth, color=colour, label=name)
    axes.axhline(3 / 7, color="grey", linestyle=":", label="a policy that ignores feedback: 3/7")
    axes.set(xlabel="step", ylabel="games won, sampled", ylim=(0, 1.02))
    axes.legend()
    figure.savefig(file, dpi=110)
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
