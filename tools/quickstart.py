"""The first run: a tiny model learns to sort five digits. SFT from scratch to a start, then RL to a high reward.

Usage: python tools/quickstart.py [ALGORITHM], one of yaml_configs/quickstart_ALGORITHM.yaml, ppo if none is named.
Everything goes to runs/quickstart*; a new call starts afresh. `gpu`, not tried yet: a larger model in bfloat16, and
SGLang, on one GPU.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PHASE_TIMEOUT_S = 1800
# where the task is, what starts the model, and which model
CPU = ("runs/quickstart", "quickstart_sft", ())
GPU = ("runs/quickstart_gpu_task", "quickstart_gpu_sft", ("--sizes", "yaml_configs/models/sort-20m/config.json"))


def run(what: str, *command: str) -> None:
    print(f"\n== {what}", flush=True)
    started = time.monotonic()
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=PHASE_TIMEOUT_S)
    print(f"== {what}: {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = sorted(file.stem.removeprefix("quickstart_") for file in (ROOT / "yaml_configs").glob("quickstart_*.yaml"))
    names = [name for name in found if not name.endswith("sft")]
    parser.add_argument("algorithm", nargs="?", choices=names, default="ppo")
    algorithm = parser.parse_args().algorithm
    task, sft, sizes = GPU if algorithm == "gpu" else CPU
    for name in (task, f"runs/{sft}", f"runs/quickstart_{algorithm}"):
        shutil.rmtree(ROOT / name, ignore_errors=True)
    run("making the task: sort five digits", "tools/make_sort_task.py", task, *sizes)
    run("supervised start from random weights", "-m", "mrl", "train", f"yaml_configs/{sft}.yaml")
    config = f"yaml_configs/quickstart_{algorithm}.yaml"
    if algorithm == "dpo":
        run("DPO on pairs", "-m", "mrl", "train", config)
        for model in (f"runs/{sft}/hf", "runs/quickstart_dpo/hf"):
            run("answers", "tools/exact_match.py", model, f"{task}/data/validation.jsonl", "--rows", "512")
    else:
        run(f"{algorithm.upper()} against a real SGLang server", "-m", "mrl", "train", config)
    run("report", "-m", "mrl", "report", f"runs/quickstart_{algorithm}")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"quickstart stopped: `{' '.join(error.cmd[1:])}` ended with exit code {error.returncode}")
