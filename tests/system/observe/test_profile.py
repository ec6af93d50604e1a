"""`mrl profile` as a user runs it."""

from __future__ import annotations

import os
from pathlib import Path

from mrl import platform

platform.install()


from mrl.config.loader import dump_resolved  # noqa: E402
from mrl.observe import read_metrics  # noqa: E402
from tests.conftest import TinyModels  # noqa: E402
from tests.helpers import zygote  # noqa: E402
from tests.unit.observe.test_watching import sft_config  # noqa: E402

# Accepts nsys's options and executes the command after them.
NSYS = """#!/bin/sh
echo "$@" > "$NSYS_SEEN.$RANK"
shift
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


def test_nsys_wraps_the_ranks_that_are_profiled(tiny_models: TinyModels, tmp_path: Path) -> None:
    file, tools = tmp_path / "config.yaml", tmp_path / "bin"
    file.write_text(dump_resolved(sft_config(tmp_path, tiny_models("llama"), "float32")))
    command = ("mrl", "profile", file, "--nsys", "--ranks", "1", "run.nproc=2", "run.root=" + str(tmp_path / "runs"))
    tools.mkdir()
    missing = zygote.run(*command, PATH=str(tools))
    assert missing.returncode == 1 and "run.profile.tool: nsys is not on PATH" in missing.stderr
    (tools / "nsys").write_text(NSYS)
    (tools / "nsys").chmod(0o755)
    done = zygote.run(*command, PATH=f"{tools}:{os.environ['PATH']}", NSYS_SEEN=str(tmp_path / "seen"))
    assert done.returncode == 0, done.stderr[-2000:]
    (seen,) = tmp_path.glob("seen.*")
    run_dir, words = tmp_path / "runs/run-profile", seen.read_text().split()
    assert seen.name == "seen.1" and words[0] == "profile"
    assert f"--output={run_dir}/logs/nsys_rank_%q{{RANK}}" in words and "mrl" in words
    assert [row["step"] for row in read_metrics(run_dir)] == [1, 2]


def test_a_profile_leaves_no_checkpoint_and_can_be_taken_again(tiny_models: TinyModels, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_resolved(sft_config(tmp_path, tiny_models("llama"), "float32")))
    often = ("checkpoint.every_steps=1", "checkpoint.weights_every_steps=1", "checkpoint.export_hf=true")
    run_dir = tmp_path / "runs/run-profile"
    for _ in range(2):
        done = zygote.run(
            "mrl", "profile", file, *often, "batch.epochs=5", "run.trackers=[]", "run.root=" + str(run_dir.parent)
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert (run_dir / "profile/step_2_rank_0.json.gz").is_file()
        assert not any(run_dir.glob("checkpoints/step_*")) and not any(run_dir.glob("hf*"))
        assert [row["step"] for row in read_metrics(run_dir)] == [1, 2]
    assert (run_dir / "earlier_1/profile/step_2_rank_0.json.gz").is_file()
