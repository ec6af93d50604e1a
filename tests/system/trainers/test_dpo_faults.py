"""`trainer: dpo` survives killed ranks, signals, a full disk, and a non-finite loss."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mrl.observe import read_metrics
from mrl.resilience import EXIT_PREEMPTED
from mrl.trainers.dpo import reference
from tests.conftest import TinyModels
from tests.helpers.dpo_config import CACHE, write
from tests.helpers.full_disk import full_disk
from tests.helpers.nonfinite import LETTER, letter_model, lines
from tests.helpers.runs import results, train
from tests.helpers.train_tools import ROOT, Train
from tests.system.launcher.test_survival import FAULTS, KINDS

pytestmark = pytest.mark.long

RUN_S = 400.0
STEPS = 6
MATRIX: list[dict[str, Any]] = [
    {"kind": "kill", "section": "setup", "rank": 1, "nth": 1},  # while the reference's sums are computed
    {"kind": "kill", "section": "setup", "rank": 1, "nth": 1, "early": True},  # before its monitor is told
    {"kind": "kill", "section": "update", "rank": 1, "nth": 2},
    {"kind": "kill", "section": "checkpoint", "rank": 0, "nth": 1},
]  # test_survival.py covers exceptions and hangs, for which the launcher does the same for every trainer
LIMITS = {"setup": 40.0, "update": 12.0, "checkpoint": 12.0, "out_of_section": 40.0}
TWO = {"actor": {"optimizer": {"lr": 1e-3}, "parallel": {"tensor": 2}, "max_tokens_per_microbatch": 64}}


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a two-rank configuration with a cached reference, and of its undisturbed run."""
    folder = tmp_path_factory.mktemp("dpo_faults")
    more = {"preference": {"loss": {"sigmoid": {}, "sft": {"weight": 0.2}}}, "ref": {"policy": "cached"}}
    config = write(folder, tiny_models("llama"), **TWO, checkpoint={"every_steps": 1, "export_hf": True}, **more)
    settings = yaml.safe_load(config.read_text())
    settings["run"] |= {"steps": STEPS, "timeout_s": 120.0}
    config.write_text(yaml.safe_dump(settings))
    train(folder, config, "run.name=undisturbed")
    return folder


def assert_undisturbed(folder: Path, name: str) -> None:
    runs = folder / "runs"
    assert results(runs / name) == results(runs / "undisturbed")
    assert list(results(runs / name)) == list(range(1, STEPS + 1))
    files = [load_file(runs / run / "hf/model.safetensors") for run in (name, "undisturbed")]
    assert all(bool((files[0][key] == files[1][key]).all()) for key in files[1])


@pytest.mark.slow
def test_every_fault_is_answered_and_nothing_is_lost(folder: Path) -> None:
    (folder / "faults.json").write_text(json.dumps(MATRIX))
    more = [f"run.max_restarts={len(MATRIX)}", "run.launcher=ft", f"resilience.timeouts_s={json.dumps(LIMITS)}"]
    environment = {"PYTHONPATH": f"{FAULTS}:{ROOT}", "MRL_TEST_FAULTS": str(folder / "faults.json")}
    with Train(folder, folder / "config.yaml", "run.name=disturbed", *more, **environment) as run:
        assert run.wait(RUN_S) == 0, run.terminal[-6000:]
        assert run.left_running() == {}
    rows = [json.loads(line) for line in (folder / "runs/disturbed/logs/restarts.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["section"]) for row in rows] == [(KINDS[f["kind"]], f["section"]) for f in MATRIX], rows
    assert_undisturbed(folder, "disturbed")
    assert not list((folder / "runs/disturbed/checkpoints").glob("*.tmp"))


@pytest.mark.slow
def test_sigterm_saves_and_leaves(folder: Path) -> None:
    config = folder / "config.yaml"
    with Train(folder, config, "run.name=signals", "checkpoint.every_steps=100") as run:
        run.wait_for("step 2/", RUN_S)
        run.signal(signal.SIGTERM)
        assert run.wait(RUN_S) == EXIT_PREEMPTED, run.terminal
        assert run.left_running() == {}
    assert "stopping after step" in run.terminal and "error" not in run.terminal, run.terminal
    said = train(folder, config, "run.name=signals").terminal
    assert "resuming from" in said and f"using the log-probs of 12 rows from {folder}" in said
    assert_undisturbed(folder, "signals")


def test_a_cache_that_does_not_fit_on_the_disk(tmp_path: Path) -> None:
    """If a new cache does not fit on the disk, the old one stays and no part of the new one remains."""
    file, sums = tmp_path / CACHE, torch.randn(12, 2)
    reference._write(file, "old", sums)
    with full_disk(100), pytest.raises(Exception, match="File too large"):
        reference._write(file, "new", sums)
    assert reference._read(file)[1] == "old" and os.listdir(tmp_path) == [CACHE]


@pytest.mark.parametrize(
    "loss", ["sigmoid", pytest.param({"aot": {}, "sft": {"with_prompt": True}}, marks=pytest.mark.slow)]
)
def test_a_pair_whose_loss_is_not_finite_is_named_and_skipped(loss: Any, tmp_path: Path) -> None:
    """A pair with a non-finite loss is named and skipped: in one pass, in two passes, and with trained prompts. Only
    its chosen response is at fault."""
    config = write(tmp_path, letter_model(tmp_path), preference={"loss": loss})
    settings = yaml.safe_load(config.read_text())
    settings["data"]["shuffle"] = False
    config.write_text(yaml.safe_dump(settings | {"checkpoint": {"every_steps": 100}}))
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    rows[7]["chosen"] = LETTER + rows[7]["chosen"]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Train(tmp_path, config, "run.steps=3") as run:
        assert run.wait(RUN_S) == 0, run.terminal[-4000:]
    assert "step 2: 1 of 1 updates skipped because the loss or gradient was not finite; their samples: " in run.terminal
    told = [(line["step"], line["by"], line["sample_ids"], line["rows"]) for line in lines(tmp_path / "runs/run")]
    assert told == [(2, "outputs", [2], [7])]
    found = read_metrics(tmp_path / "runs/run")
    assert [row["actor/skipped"] for row in found] == [0, 1, 0] and "actor/loss" not in found[1]
