"""`checkpoint.push_to_hub`: the upload of huggingface_hub to a hub on loopback, and what remains if it fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mrl.config.schema import CheckpointConfig
from mrl.trainers.shared import hub as hub_module
from mrl.trainers.shared.hub import push_to_hub
from tests.conftest import TinyModels
from tests.helpers.hub_server import TOKEN, Hub
from tests.helpers.runs import train
from tests.helpers.sft_config import write

ONE_STEP = ("run.steps=1",)


def put(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def export(folder: Path) -> Path:
    (folder / "hf").mkdir()
    (folder / "hf/model.safetensors").write_bytes(b"weights")
    (folder / "hf/README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    return folder / "hf"


def test_a_run_uploads_its_export_with_its_card(
    tmp_path: Path, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path, tiny_models("llama"), checkpoint={"push_to_hub": "me/tiny"})
    with Hub() as hub:
        put(monkeypatch, hub.env)
        run = train(tmp_path, config, *ONE_STEP)
    exported = tmp_path / "runs/run/hf"
    files = {str(path.relative_to(exported)): path.read_bytes() for path in exported.rglob("*") if path.is_file()}
    assert hub.files == files and {"README.md", "config.json"} < files.keys()
    assert hub.large and set(hub.large.values()) <= set(files.values()), "weights go by git LFS"
    [created] = hub.created
    assert (created["organization"], created["name"], created["visibility"]) == ("me", "tiny", "private")
    assert f"uploaded {exported} to me/tiny on the Hugging Face hub" in run.terminal
    assert "me/tiny" not in (exported / "README.md").read_text() and TOKEN not in run.terminal


def test_a_refused_upload_names_the_command_that_repeats_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, waits = export(tmp_path), list[None]()
    cfg = CheckpointConfig(export_hf=True, push_to_hub="me/tiny", hub_private=False)
    with Hub() as hub:
        put(monkeypatch, {**hub.env, "HF_TOKEN": "another"})
        note = push_to_hub(directory, cfg, lambda: waits.append(None))
        assert note.startswith(f"{directory} is complete, but not uploaded to me/tiny: Error: ") and "401" in note
        assert str(tmp_path / "logs/hub.log") in note and hub.files == {} and waits
        command = note.partition("Repeat the upload with: ")[2]
        done = subprocess.run(command, shell=True, env={**os.environ, **hub.env}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert hub.files["model.safetensors"] == b"weights"
    assert "visibility" not in hub.created[0], "its owner's default"


def test_an_upload_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "POLL_S", 0.01)
    cfg = CheckpointConfig(export_hf=True, push_to_hub="me/tiny", timeout_s=0.1)
    note = push_to_hub(export(tmp_path), cfg, lambda: None)
    assert "not finished within 0.1 s (checkpoint.timeout_s)" in note
