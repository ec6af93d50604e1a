"""`mrl preflight` on a small run with one mistake."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mrl import cli
from tests.helpers.bad_runs import Mistake
from tests.helpers.train_tools import write_config


def preflight_run(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Mistake], tuple[int, dict[str, Any]]]:
    """Writes a valid run into `folder` and changes to that directory. Returns a function that applies a mistake and
    returns the exit code and the JSON output of `mrl preflight --json`."""
    monkeypatch.chdir(folder)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(model, folder / "model")
    config = write_config(folder, Path("model"), reward={"function": "exact_match"}, run={"root": "runs"})
    content = yaml.safe_load(config.read_text())
    content["data"]["train"] = "train.jsonl"
    config.write_text(yaml.safe_dump(content))

    def go(mistake: Mistake) -> tuple[int, dict[str, Any]]:
        patch: dict[str, Any] = {}
        if mistake.edit is not None:
            mistake.edit(folder, patch)
        for name, value in patch.items():
            monkeypatch.setattr(name, value)
        for name, value in mistake.environment.items():
            monkeypatch.setenv(name, value)
        code = cli.main(["preflight", "config.yaml", *mistake.keys, *mistake.arguments, "--json"])
        assert not torch.distributed.is_initialized()
        return code, json.loads(capsys.readouterr().out)

    return go


def assert_named(mistake: Mistake, code: int, said: dict[str, Any]) -> None:
    problems = [f"{f['text']}: {f['remedy']}" for f in said["findings"] if f["verdict"] == "problem"]
    assert code == said["exit_code"] == mistake.code, said
    assert any(all(part in problem for part in mistake.says) for problem in problems), problems
