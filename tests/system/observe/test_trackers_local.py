"""The trackers' own packages with local files; they start processes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.unit.observe.test_trackers import config, tracked


def test_mlflow_s_local_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="needs mlflow-skinny (the extra `trackers`)")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("mrl.observe.remote_tracker.CLOSE_S", 120.0)
    cfg = config(tmp_path, trackers=("mlflow",), mlflow={"experiment": "sorting", "tags": {"team": "rl"}})
    [run_id] = tracked(cfg, range(1, 3)).values()
    assert tracked(cfg, range(3, 4)) == {"mlflow": run_id}, "the same run goes on"
    client = tracking.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    run = client.get_run(run_id)
    assert run.info.run_name == "one" and run.info.status == "FINISHED" and run.data.tags["team"] == "rl"
    history = client.get_metric_history(run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert run.data.metrics["time/update"] == 2.0 and run.data.metrics["reward/a_b"] == 1.0
    assert run.data.params["actor.optimizer.lr"] == "1e-06" and "hidden" not in str(run.data.params)


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """wandb gets one offline run in the file that `wandb sync` uploads. Its first import takes long on a busy machine,
    and a separate process writes the file, perhaps after wandb reports the end of the run."""
    monkeypatch.setattr("mrl.observe.remote_tracker.CLOSE_S", 120.0)
    pytest.importorskip("wandb", reason="needs wandb (the extra `trackers`)")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    for name in ("mcp", "openai", "agents", "verifiers"):  # wandb lists those that another test imported
        monkeypatch.delitem(sys.modules, name, raising=False)
    cfg = config(tmp_path, trackers=("wandb",), wandb={"project": "sorting", "mode": "offline", "tags": ("small",)})
    [run_id] = tracked(cfg, range(1, 4)).values()
    [file] = (tmp_path / "one/wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    end = time.monotonic() + 60.0
    while (stored := file.read_bytes()).count(b"time/update") < 3:
        assert time.monotonic() < end, stored[:2000]
        time.sleep(0.1)
    assert b"sorting" in stored and b"small" in stored and b"hidden" not in stored
    assert json.loads((tmp_path / "one/trackers/wandb.json").read_text()) == {"run_id": run_id, "sent_to_step": 3}
    shown = capfd.readouterr()
    assert f"wandb: offline, {file.parent} (upload it with wandb sync)" in shown.out
    assert "wandb" not in shown.err  # threads of other tests may write to stderr


def test_trackio_s_local_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trackio gets one run in its local database, and resumes it by name."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr("mrl.observe.remote_tracker.CLOSE_S", 120.0)
    storage = pytest.importorskip("trackio.sqlite_storage", reason="needs trackio (the extra `trackio`)")
    cfg = config(tmp_path, trackers=("trackio",), trackio={"project": "sorting"})
    [run_id] = tracked(cfg, range(1, 3)).values()
    assert run_id.startswith("one-") and tracked(cfg, range(3, 4)) == {"trackio": run_id}
    assert storage.SQLiteStorage.get_runs("sorting") == [run_id]
    logs = storage.SQLiteStorage.get_logs("sorting", run_id)
    assert [(row["step"], row["loss"], row["time/update"]) for row in logs] == [(n, n / 10, 2.0) for n in (1, 2, 3)]
    assert all(b"hidden" not in file.read_bytes() for file in (tmp_path / "trackio").rglob("*") if file.is_file())


def test_swanlab_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """swanlab gets one folder per start with the same run id; `swanlab sync` uploads them."""
    pytest.importorskip("swanlab", reason="needs swanlab (the extra `swanlab`)")
    monkeypatch.setattr("mrl.observe.remote_tracker.CLOSE_S", 120.0)
    cfg = config(tmp_path, trackers=("swanlab",), swanlab={"project": "sorting", "mode": "offline", "tags": ("small",)})
    [run_id] = tracked(cfg, range(1, 4)).values()
    [file] = (tmp_path / "one/swanlab").glob(f"run-*-{run_id}/run-{run_id}.swanlab")
    stored = file.read_bytes()
    assert stored.count(b"time/update") >= 3 and b"sorting" in stored and b"small" in stored
    assert all(b"hidden" not in each.read_bytes() for each in file.parent.rglob("*") if each.is_file())
    assert json.loads((tmp_path / "one/trackers/swanlab.json").read_text()) == {"run_id": run_id, "sent_to_step": 3}
    assert "(upload it with swanlab sync)" in capfd.readouterr().out
