"""The first run: a tiny model learns to sort five digits. SFT from scratch to a start, then RL to a high reward.

Usage: python tools/quickstart.py [ALGORITHM], one of yaml_configs/quickstart_ALGORITHM.yaml, ppo if none is named.
Everything goes to runs/quickstart*; a new call starts afresh.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TASK = Path("runs/quickstart")
PHASE_TIMEOUT_S = 1800


def run(what: str, *command: str) -> None:
    print(f"\n== {what}", flush=True)
    started = time.monotonic()
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=PHASE_TIMEOUT_S)
    print(f"== {what}: {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(file.stem.removeprefix("quickstart_") for file in (ROOT / "yaml_configs").glob("quickstart_*.yaml"))
    parser.add_argument("algorithm", nargs="?", choices=[name for name in names if name != "sft"], default="ppo")
    algorithm = parser.parse_args().algorithm
    for name in (TASK, Path("runs/quickstart_sft"), Path(f"runs/quickstart_{algorithm}")):
        shutil.rmtree(ROOT / name, ignore_errors=True)
    run("making the task: sort five digits", "tools/make_sort_task.py", str(TASK))
    run("supervised start from random weights", "-m", "mrl", "train", "yaml_configs/quickstart_sft.yaml")
    run(f"{algorithm.upper()} against a real SGLang server", "-m", "mrl", "train",
        f"yaml_configs/quickstart_{algorithm}.yaml")  # fmt: skip
    run("report", "-m", "mrl", "report", f"runs/quickstart_{algorithm}")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"quickstart stopped: `{' '.join(error.cmd[1:])}` ended with exit code {error.returncode}")
