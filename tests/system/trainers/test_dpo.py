"""`trainer: dpo` as a user runs it: metrics, references, resuming after a kill, and refusals."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.helpers.dpo_config import CACHE, write
from tests.helpers.runs import difference, results, train, train_and_kill
from tests.system.trainers.test_resume import TinyModels

pytestmark = pytest.mark.long

WEIGHTS = ("preference.loss.kto.desirable_weight=1.5",)


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of three runs: `whole` and `killed` with cached reference log-probs, and `live` with a live
    reference at TP2. The killed run's cache is corrupted before it resumes."""
    folder = tmp_path_factory.mktemp("dpo")
    preference = {"loss": {"sigmoid": {"beta": 0.2}, "sft": {"weight": 0.5}}}
    data = {"validation": str(folder / "pairs.jsonl"), "train": str(folder / "pairs.jsonl")}
    data |= {"max_prompt_tokens": 16, "max_tokens": 32}
    validation = {"every_steps": 1, "metric": "rewards/margins", "patience": 3, "keep_best": True}
    keys = {"data": data, "validation": validation}
    config = write(folder, tiny_models("llama"), preference=preference, ref={"policy": "cached"}, **keys)
    train(folder, config, "run.name=whole")
    train_and_kill(folder, folder / "runs/killed", config, "run.name=killed", "run.steps=50")
    spoil(folder / "runs/killed" / CACHE)
    (folder / "terminal").write_text(train(folder, config, "run.name=killed").terminal)
    train(folder, config, "run.name=live", "ref.policy=frozen", "actor.parallel.tensor=2")
    return folder


def spoil(file: Path) -> None:
    with safe_open(file, "pt") as stored:
        sums = stored.get_tensor("sums")
    save_file({"sums": sums + 1}, file, {"key": "of other weights"})


def test_killed_and_started_again_is_the_same_run_to_the_bit(folder: Path) -> None:
    whole, killed = (folder / "runs" / name for name in ("whole", "killed"))
    assert results(killed) == results(whole) and list(results(whole)) == [0, 1, 2, 3, 4]
    assert set(difference(whole, killed).values()) == {0.0}


def test_a_cache_of_something_else_is_made_again_and_that_is_said(folder: Path) -> None:
    said = (folder / "terminal").read_text()
    assert f"{CACHE} was computed from other tokens or weights: computing it again" in said
    assert "wrote the log-probs of 12 rows to" in said and "its weights are freed" in said


def test_a_live_reference_at_tp2_is_the_cached_one_in_one_process(folder: Path) -> None:
    """A live reference at TP2 gives the metrics of the cached one in one process, except the accuracy of tied pairs,
    which depends on rounding."""
    cached, live = (results(folder / "runs" / name) for name in ("whole", "live"))
    for step, row in cached.items():
        wanted = {name: value for name, value in row.items() if step > 1 or "accuracies" not in name}
        found = {name: live[step][name] for name in wanted}
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5) and live[step].keys() == row.keys(), step
    weights, others = (load_file(folder / "runs" / name / "hf/model.safetensors") for name in ("whole", "live"))
    assert all((weights[name] - other).norm() < 1e-5 * other.norm() for name, other in others.items())


def test_a_live_reference_is_part_of_what_a_step_computes(folder: Path) -> None:
    cached, live = (
        [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()][-1]
        for name in ("whole", "live")
    )
    assert live["perf/model_tflop"] == pytest.approx(cached["perf/model_tflop"] * 4 / 3, rel=0.05)


def test_what_the_first_step_reports(folder: Path) -> None:
    """In the first step policy and reference are equal: the loss is log 2, no pair is won, and there is no gap."""
    first = results(folder / "runs/whole")[1]
    assert first["dpo/first_gap"] < 1e-4
    assert first["dpo/loss_by_type/sigmoid"] == pytest.approx(math.log(2), rel=1e-4)
    assert first["actor/loss"] == pytest.approx(math.log(2) + 0.5 * first["dpo/loss_by_type/sft"], rel=1e-4)
    assert first["dpo/loss_by_type/sft"] == pytest.approx(first["dpo/nll_loss"], rel=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-4) and first["actor/entropy"] > 0
    assert 0 <= first["dpo/mean_token_accuracy"] < 1 and math.isfinite(
        first["logits/chosen"] + first["logits/rejected"]
    )
    assert first["logps/chosen"] < 0 and first["dpo/length_chosen"] > 1 and first["dpo/cut_share"] == 0


def test_later_ones_show_that_it_learns(folder: Path) -> None:
    last = results(folder / "runs/whole")[4]
    assert "dpo/first_gap" not in last and last["rewards/margins"] > 0.1
    assert last["rewards/accuracies"] > 0.5 and last["dpo/loss_by_type/sigmoid"] < math.log(2)
    assert {"rewards/accuracies/source/a", "rewards/accuracies/chosen_longer"} <= last.keys()


def test_held_out_rows_are_one_batch_of_the_same_numbers(folder: Path) -> None:
    """The held-out rows, here the training rows, are measured as one batch before the first step and after every step.
    The best step by these metrics is kept."""
    rows = results(folder / "runs/whole")
    held = {step: {k[11:]: v for k, v in row.items() if k.startswith("validation/")} for step, row in rows.items()}
    assert list(held) == [0, 1, 2, 3, 4]
    assert held[0]["dpo/loss_by_type/sigmoid"] == pytest.approx(math.log(2), rel=1e-4)
    assert held[0]["loss"] == pytest.approx(math.log(2) + 0.5 * held[0]["dpo/loss_by_type/sft"], rel=1e-4)
    assert held[4]["loss"] < held[0]["loss"] and held[4]["rewards/margins"] > 0.1
    assert held[4]["rewards/accuracies"] > 0.5 and held[4]["logps/chosen"] > held[0]["logps/chosen"]
    best = max(range(1, 5), key=lambda step: held[step]["rewards/margins"])
    assert os.readlink(folder / "runs/whole/checkpoints/best") == f"step_{best}"
    assert (folder / "runs/whole/hf_best/model.safetensors").is_file()


def test_the_export_is_what_was_trained(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "runs/whole/hf")
    other = AutoModelForCausalLM.from_pretrained(folder / "runs/killed/hf").state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in model.state_dict().items())


@pytest.fixture(scope="module")
def labels(folder: Path, tiny_models: TinyModels) -> Path:
    """Trains on labelled rows with a moving reference and a moving threshold; returns the configuration."""
    data = {"train": str(folder / "labels.jsonl"), "max_prompt_tokens": 16, "max_tokens": 32}
    ref = {"policy": "refreshed", "refresh_every_steps": 1, "refresh_share": 0.5}
    loss = {"loss": {"bco": {}, "kto": {}}}
    config = write(folder, tiny_models("llama"), "labels.yaml", preference=loss, data=data, ref=ref)
    (folder / "labels_terminal").write_text(train(folder, config, "run.name=labels", *WEIGHTS).terminal)
    return config


def test_labels_a_moving_reference_and_a_moving_threshold(folder: Path, labels: Path) -> None:
    said = (folder / "labels_terminal").read_text()
    assert "kto: 12 desirable and 12 undesirable rows have total weights 18 and 12" in said
    rows = results(folder / "runs/labels")
    assert len({row["dpo/shift"] for row in rows.values()}) == 4 and "dpo/kl" in rows[1]
    assert rows[1]["dpo/first_gap"] == 0


@pytest.mark.slow
def test_labels_a_moving_reference_and_a_moving_threshold_go_on_exactly(folder: Path, labels: Path) -> None:
    whole, killed = (folder / "runs" / name for name in ("labels", "labels_killed"))
    train_and_kill(folder, killed, labels, "run.name=labels_killed", "run.steps=50", *WEIGHTS)
    train(folder, labels, "run.name=labels_killed", *WEIGHTS)
    assert results(killed) == results(whole) and set(difference(whole, killed).values()) == {0.0}
