"""`trainer: sft` as a user runs it: held-out rows, early stopping and the best checkpoint, resuming after a kill,
epochs, and refusals."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import TinyModels
from tests.helpers import zygote
from tests.helpers.runs import VOCAB, results, train, train_and_kill
from tests.helpers.sft_config import write

pytestmark = pytest.mark.longest


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on two ranks until early stopping. Kills the same run after step 3, resumes it, and starts it once more."""
    folder = tmp_path_factory.mktemp("sft")
    config = write(folder, tiny_models("llama"), actor={"parallel": {"tensor": 2}})
    (folder / "terminal").write_text(train(folder, config, "run.name=whole").terminal)
    train_and_kill(folder, folder / "runs/killed", config, "run.name=killed")
    train(folder, config, "run.name=killed")
    (folder / "again").write_text(train(folder, config, "run.name=killed").terminal)
    return folder


def losses(run_dir: Path) -> dict[int, float]:
    return {step: row["validation/loss"] for step, row in results(run_dir).items() if "validation/loss" in row}


def test_it_ends_where_nothing_gets_better_any_more(folder: Path) -> None:
    found = losses(folder / "runs/whole")
    assert list(found) == list(range(len(found))) and 4 < len(found) < 50, "before step 1, and after every step"
    best = min(range(1, len(found)), key=lambda step: found[step])
    stalled = [step for step in range(1, len(found)) if found[step] < min(found[i] for i in range(step)) - 0.01]
    assert len(found) - 1 == stalled[-1] + 2, "patience: two validations without progress"
    said = (folder / "terminal").read_text()
    assert f"(best: loss {found[best]:.4f} at step {best})" in said
    assert "validation loss" in said or "held-out loss" in said


def test_the_best_checkpoint_stays_besides_the_last_and_is_exported(folder: Path) -> None:
    run_dir = folder / "runs/whole"
    found = losses(run_dir)
    best = min(range(1, len(found)), key=lambda step: found[step])
    checkpoints = run_dir / "checkpoints"
    assert os.readlink(checkpoints / "best") == f"step_{best}"
    assert {path.name for path in checkpoints.iterdir()} == {"best", f"step_{best}", f"step_{len(found) - 1}"}
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    exported, said = nll(run_dir / "hf_best", rows), results(run_dir)[best]
    assert exported["loss"] == pytest.approx(found[best], rel=1e-5)
    assert exported["token_accuracy"] == said["validation/token_accuracy"] > 0
    assert nll(run_dir / "hf", rows)["loss"] == pytest.approx(found[len(found) - 1], rel=1e-5)


@pytest.mark.slow
def test_a_best_checkpoint_that_cannot_be_written_costs_no_earlier_one(folder: Path) -> None:
    """A best checkpoint that cannot be written, because a dangling link is in its place, removes no earlier one."""
    found, run_dir = losses(folder / "runs/whole"), folder / "runs/unsaved"
    best = min(range(1, len(found)), key=lambda step: found[step])
    before = min(range(1, best), key=lambda step: found[step])
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / f"checkpoints/step_{best}").symlink_to("nowhere")
    run = train(folder, folder / "config.yaml", "run.name=unsaved", "checkpoint.on_error=warn")
    assert losses(run_dir) == found and os.readlink(run_dir / "checkpoints/best") == f"step_{before}"
    said = f"its checkpoint was not written; the weights of step {before} are in {run_dir / 'hf_best'}"
    assert f"best validation: loss {found[best]:.4f} at step {best}; {said}" in run.terminal.replace("\n", "")
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    assert nll(run_dir / "hf_best", rows)["loss"] == pytest.approx(found[before], rel=1e-5)


@pytest.mark.slow
def test_validations_are_no_part_of_what_a_step_computes(folder: Path) -> None:
    def computed(name: str) -> list[float]:
        lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [row["perf/model_tflop"] for row in map(json.loads, lines) if row["step"]]

    train(folder, folder / "config.yaml", "run.name=seldom", "run.steps=3", "validation.every_steps=3")
    assert computed("seldom") == computed("whole")[:3]


def nll(model_dir: Path, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns transformers' metrics of the answers and their EOS over all tokens, in total and by kind."""
    tokenizer, model = AutoTokenizer.from_pretrained(model_dir), AutoModelForCausalLM.from_pretrained(model_dir).float()
    sums: dict[str, list[float]] = {}
    for row in rows:
        prompt = tokenizer(row["prompt"]).input_ids
        answer = [*tokenizer(row["answer"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            log_p = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        picked, right = log_p.gather(1, torch.tensor(answer)[:, None])[:, 0], log_p.argmax(-1) == torch.tensor(answer)
        for name in ("", f"/{row['data_source']}"):
            of = sums.setdefault(name, [0.0, 0.0, 0.0])
            sums[name] = [of[0] - float(picked.sum()), of[1] + float(right.sum()), of[2] + len(answer)]
    found = {f"loss{name}": loss / count for name, (loss, _, count) in sums.items()}
    return found | {f"token_accuracy{name}": right / count for name, (_, right, count) in sums.items()}


def test_what_held_out_rows_say_is_what_transformers_says(folder: Path, tiny_models: TinyModels) -> None:
    first = results(folder / "runs/whole")[0]
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    for name, value in nll(tiny_models("llama"), rows).items():
        assert first[f"validation/{name}"] == pytest.approx(value, rel=1e-5), name
        if name.startswith("loss"):
            perplexity = first[f"validation/{name.replace('loss', 'perplexity')}"]
            assert perplexity == pytest.approx(math.exp(value), rel=1e-4)
    assert first["validation/tokens"] == sum(len(row["answer"]) + 1 for row in rows)


def test_killed_and_started_again_is_the_same_run_to_the_bit(folder: Path) -> None:
    whole, killed = (folder / "runs" / name for name in ("whole", "killed"))
    assert results(killed) == results(whole)
    assert os.readlink(killed / "checkpoints/best") == os.readlink(whole / "checkpoints/best")
    last = f"checkpoints/step_{max(results(whole))}"
    done = zygote.run("tests.worlds.compare_checkpoints", whole / last, killed / last, str(VOCAB))
    assert set(json.loads(done.stdout.splitlines()[-1]).values()) == {0.0}
    for name in ("hf", "hf_best"):
        one, other = (AutoModelForCausalLM.from_pretrained(run / name).state_dict() for run in (whole, killed))
        assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_a_run_that_has_ended_early_stays_ended(folder: Path) -> None:
    assert "stopped early: raise validation.patience to continue training" in (folder / "again").read_text()
