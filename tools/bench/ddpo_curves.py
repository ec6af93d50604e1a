"""Learning curves of the DDPO quickstart for several seeds, with its reward and with a control, shuffled rewards.

    python -m tools.bench.ddpo_curves [--forms brightness,shuffled] [--seeds 3] [--steps 16]

Run `python tools/quickstart.py ddpo` first: it writes the initial model to runs/quickstart_ddpo_sft/hf. Each run has
one process and the directory runs/ddpo_FORM_SEED; complete runs are not repeated. Writes tools/bench/results/ddpo.json
and docs/ddpo.png.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from tools.bench import record
from tools.bench.fp8_curves import figures, plot, rewards

REWARDS = {
    "brightness": "brightness",
    "shuffled": "tools/image_rewards.py:brightness_of_others",
}
RUN_TIMEOUT_S = 600


def train(form: str, seed: int, steps: int) -> list[float]:
    """Returns the mean reward of every step, from a finished run if there is one."""
    name = f"ddpo_{form}_{seed}"
    overrides = [f"run.name={name}", f"run.seed={seed}", f"run.steps={steps}", "run.nproc=1", "run.existing=move_aside"]
    overrides += [f"reward.function={REWARDS[form]}", "checkpoint.export_hf=false"]
    if len(rewards(record.ROOT / "runs" / name)) < steps:
        command = [sys.executable, "-m", "mrl", "train", "yaml_configs/quickstart_ddpo.yaml", *overrides]
        subprocess.run(command, cwd=record.ROOT, check=True, timeout=RUN_TIMEOUT_S)
    return rewards(record.ROOT / "runs" / name)[:steps]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=",".join(REWARDS), help=f"rewards to run, of {','.join(REWARDS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args(argv)
    seeds = range(1, args.seeds + 1)
    curves = {form: [train(form, seed, args.steps) for seed in seeds] for form in args.forms.split(",")}
    plot(record.ROOT / "docs" / "ddpo.png", "DDPO", curves)
    record.write(record.RESULTS / "ddpo.json", figures(args.steps, curves))


if __name__ == "__main__":
    main()
