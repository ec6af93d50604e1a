"""Whether the DDPO quickstart learns by its rewards: curves of several seeds, beside the same rewards given to other
images of the same step.

    python -m tools.bench.ddpo_curves [--forms brightness,shuffled] [--seeds 3] [--steps 16]

Wants what `python tools/quickstart.py ddpo` has left, the start in runs/quickstart_ddpo_sft/hf. Each run is one
process, runs/ddpo_FORM_SEED; those that are there with all their steps are not made again. Writes
tools/bench/results/ddpo.json and docs/ddpo.png.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from tools.bench import record
from tools.bench.fp8_curves import draw, figures, rewards

REWARDS = {
    "brightness": "brightness",
    "shuffled": "tools/image_rewards.py:brightness_of_others",
}
RUN_TIMEOUT_S = 600


def train(form: str, seed: int, steps: int) -> list[float]:
    """The mean reward of every step."""
    name = f"ddpo_{form}_{seed}"
    words = [f"run.name={name}", f"run.seed={seed}", f"run.steps={steps}", "run.nproc=1", "run.existing=move_aside"]
    words += [f"reward.function={REWARDS[form]}", "checkpoint.export_hf=false"]
    if len(rewards(record.ROOT / "runs" / name)) < steps:
        command = [sys.executable, "-m", "mrl", "train", "yaml_configs/quickstart_ddpo.yaml", *words]
        subprocess.run(command, cwd=record.ROOT, check=True, timeout=RUN_TIMEOUT_S)
    return rewards(record.ROOT / "runs" / name)[:steps]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=",".join(REWARDS), help=f"of {','.join(REWARDS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args(argv)
    seeds = range(1, args.seeds + 1)
    curves = {form: [train(form, seed, args.steps) for seed in seeds] for form in args.forms.split(",")}
    draw(record.ROOT / "docs" / "ddpo.png", "DDPO", curves)
    record.write(record.RESULTS / "ddpo.json", figures(args.steps, curves))


if __name__ == "__main__":
    main()
