"""`mrl profile` as a user runs it."""

from __future__ import annotations

from pathlib import Path

from mrl import platform

platform.install()


from mrl.config.loader import dump_resolved  # noqa: E402
from mrl.observe import read_metrics  # noqa: E402
from tests.conftest import TinyModels  # noqa: E402
from tests.helpers import zygote  # noqa: E402
from tests.unit.observe.test_watching import sft_config  # noqa: E402


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
