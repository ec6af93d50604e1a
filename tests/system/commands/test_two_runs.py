"""A second run in a run directory is refused, however it was started. (test_cli.py has the launcher's refusal.)"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from mrl.config.loader import load
from mrl.observe import RunDir
from tests.conftest import TinyModels
from tests.helpers import zygote
from tests.helpers.nonfinite import sft_config
from tests.helpers.slow import RUN_SLOW

RANKS = 2 if RUN_SLOW else 1


def test_under_torchrun_the_owner_is_named(tiny_models: TinyModels, tmp_path: Path) -> None:
    config = sft_config(tmp_path, tiny_models("llama"))
    with contextlib.closing(RunDir.open(load(config, []))) as run_dir:
        before = sorted(path for path in run_dir.path.rglob("*") if path.name != "lock")
        torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m", "mrl")
        done = zygote.run(*torchrun, "train", config, "run.steps=1", cwd=tmp_path, timeout_s=300)
        assert done.returncode != 0
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        said = (
            f"starting the run failed: {run_dir.path} is in use by {owner}: stop that run, or choose another run.name"
        )
        assert done.stderr.count(f"RankZeroError: {said}") == RANKS, done.stderr[-4000:]
        assert sorted(path for path in run_dir.path.rglob("*") if path.name != "lock") == before, "it wrote there"
