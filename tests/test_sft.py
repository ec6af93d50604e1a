"""`trainer: sft` as a user runs it: held-out rows, early stop and the best checkpoint, a death, epochs, and what is
refused."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl import cli
from mrl.config.loader import ConfigError, load
from mrl.config.schema import HeldOutConfig, SFTConfig
from mrl.data.open_data import with_steps
from mrl.trainers.shared.best_validation import BestValidation
from tests import zygote
from tests.conftest import TinyModels
from tests.test_resume import VOCAB, results, train, train_and_kill


def write(folder: Path, model: Path, name: str = "config.yaml", **keys: Any) -> Path:
    """FOLDER/NAME, twelve sums to learn, and eight held-out rows of two kinds."""
    rows = [{"prompt": f"{n} + {n} =", "answer": f"{2 * n}" * (n % 3 + 1)} for n in range(1, 13)]
    held_out = [
        {"prompt": f"{n} * {n} =", "answer": f"{n * n}" * (n % 4 + 1), "data_source": "ab"[n % 2]} for n in range(1, 9)
    ]
    for file, content in (("train", rows), ("held_out", held_out)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    config: dict[str, Any] = {
        "trainer": "sft",
        "run": {"name": "run", "root": str(folder / "runs"), "steps": 50, "trackers": []},
        "model": {"path": str(model), "dtype": "float32"},
        "actor": {"optimizer": {"lr": 3e-3}, "max_tokens_per_microbatch": 60},
        "data": {
            "train": str(folder / "train.jsonl"),
            "validation": str(folder / "held_out.jsonl"),
            "max_prompt_tokens": 16,
        },
        "batch": {"samples_per_step": 6},
        "validation": {"every_steps": 1, "patience": 2, "min_delta": 0.01, "keep_best": True},
        "checkpoint": {"every_steps": 2, "keep_last": 1, "export_hf": True},
        "resilience": {"straggler_every_steps": 1000},  # which tells how fast ranks were
    }
    for key, section in keys.items():
        config[key] = {**config.get(key, {}), **section}
    (folder / name).write_text(yaml.safe_dump(config))
    return folder / name


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that ends early; the same, killed after step 3 and started again, then once more."""
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


def test_a_best_checkpoint_that_cannot_be_written_costs_no_earlier_one(folder: Path) -> None:
    """A link to nowhere is in its place."""
    found, run_dir = losses(folder / "runs/whole"), folder / "runs/unsaved"
    best = min(range(1, len(found)), key=lambda step: found[step])
    before = min(range(1, best), key=lambda step: found[step])
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / f"checkpoints/step_{best}").symlink_to("nowhere")
    run = train(folder, folder / "config.yaml", "run.name=unsaved", "checkpoint.on_error=warn")
    assert losses(run_dir) == found and os.readlink(run_dir / "checkpoints/best") == f"step_{before}"
    said = f"its checkpoint was not written; the weights of step {before} are in {run_dir / 'hf_best'}"
    assert f"best validation: loss {found[best]:.4f} at step {best}: {said}" in run.terminal.replace("\n", "")
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    assert nll(run_dir / "hf_best", rows)["loss"] == pytest.approx(found[before], rel=1e-5)


def test_validations_are_no_part_of_what_a_step_computes(folder: Path) -> None:
    def computed(name: str) -> list[float]:
        lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [row["perf/model_tflop"] for row in map(json.loads, lines) if row["step"]]

    train(folder, folder / "config.yaml", "run.name=seldom", "run.steps=3", "validation.every_steps=3")
    assert computed("seldom") == computed("whole")[:3]


def nll(model_dir: Path, rows: list[dict[str, Any]]) -> dict[str, float]:
    """What transformers says of the answers and their EOS, over all their tokens; of each kind, too."""
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


def test_what_is_better_and_what_is_progress() -> None:
    best = BestValidation(HeldOutConfig(metric="token_accuracy", min_delta=0.1, patience=2, keep_best=True))
    for step, value in enumerate((0.2, 0.25, 0.4, math.nan, 0.45), 1):
        best.record(step, {"validation/token_accuracy": value})
    assert (best.value, best.step, best.stalled) == (0.45, 5, 2) and best.is_over and best.kept_step == 5
    again = BestValidation(HeldOutConfig(metric="token_accuracy", patience=3))
    again.load_state_dict(best.state_dict())
    assert again.stalled == 2 and not again.is_over and again.kept_step is None
    other = BestValidation(HeldOutConfig(patience=2))
    other.load_state_dict(best.state_dict())
    assert (other.value, other.stalled) == (None, 0), "of another metric"


def test_the_best_of_other_rows_is_not_compared_with(tiny_models: TinyModels, tmp_path: Path) -> None:
    def best_of(more: str = "", **validation: Any) -> BestValidation:
        cfg = load(write(tmp_path, tiny_models("llama"), validation=validation))
        with (tmp_path / "held_out.jsonl").open("a") as rows:
            rows.write(more)
        best = BestValidation.of(cfg)
        assert best is not None
        return best

    seen = best_of()
    seen.record(1, {"validation/loss": 0.5})
    same, fewer = best_of(patience=4), best_of(rows=2)
    same.load_state_dict(seen.state_dict())
    fewer.load_state_dict(seen.state_dict())
    more = best_of('{"prompt": "one", "answer": "more"}\n')
    more.load_state_dict(seen.state_dict())
    assert (same.value, fewer.value, more.value) == (0.5, None, None)
    fewer.record(2, {"validation/loss": 0.6})
    assert fewer.kept_step == 2


def test_epochs_are_steps_once_the_rows_are_known(tiny_models: TinyModels, tmp_path: Path) -> None:
    optimizer = {"optimizer": {"lr": 1e-3, "decay": "linear", "warmup_steps": 2}}
    config = write(tmp_path, tiny_models("llama"), run={"steps": 100}, batch={"epochs": 2.5}, actor=optimizer)
    cfg = load(config)
    assert isinstance(cfg, SFTConfig)
    resolved = with_steps(cfg, 12)
    assert resolved.run.steps == 5 == resolved.actor.optimizer.decay_steps and resolved.batch.epochs is None
    with pytest.raises(ConfigError, match="run.steps: has no effect: batch.epochs sets the length of the run"):
        load(config, ["run.steps=7"])
    with pytest.raises(ConfigError, match="required by linear decay"):
        load(config, ["batch.epochs=null"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("checkpoint.every_steps=null", "validation.keep_best: no checkpoints are written"),
        (
            "validation.patience=null; validation.keep_best=false",
            "validation.min_delta: has no effect: neither keep_best nor patience uses it",
        ),
        ("validation={metric: perplexity}", "must be one of loss, token_accuracy"),
        ("data.form=messages", "conversations need the chat template: set it to true"),
        ("model.chat_template=none.jinja", "none.jinja does not exist: expected a file with a Jinja template"),
        ("data.tools_key=functions", "data.tools_key: has no effect: chat_template is false"),
        ("packing.strategy=bfd; packing.infinite=false", "packing.infinite: has no effect: rows are packed"),
        ("data.form=messages; data.chat_template=true", "has no 'messages'"),
        ("data.form=text", "has no 'text'"),
        (
            "data.form=text; data.text_key=prompt; data.train_on=last",
            "data.train_on: has no effect: a text has no turns",
        ),
        ("data.form=text; data.text_key=prompt; data.completion_only=false", "completion_only: has no effect"),
        ("data.completion_only=false; data.train_on=last", "data.train_on: has no effect: all tokens are trained"),
        ("data.text_key=prompt", "data.text_key: has no effect: data.form is answers"),
        ("data.max_tokens=16", "leave no room for an answer in 16 tokens"),
        ("data.max_tokens=4096", "exceeds the model's 512 positions"),
        ("packing.strategy=wrapped", "packing.strategy: wrapped needs form: text, and data.form is answers"),
        ("packing.seq_length=64", "packing.seq_length: has no effect: rows are not packed"),
        ("packing.strategy=wrapped; packing.seq_length=1024", "1024 exceeds the model's 512 positions"),
        (
            "packing.strategy=wrapped; packing.seq_length=1",
            "must be at least 2: the first token of a row is not trained",
        ),
        ("loss.type=dft; loss.label_smoothing=0.1", "loss.label_smoothing: dft does not support label smoothing"),
    ],
)
def test_what_cannot_be_or_has_no_effect_is_refused(
    tiny_models: TinyModels, tmp_path: Path, override: str, said: str
) -> None:
    config = write(tmp_path, tiny_models("llama"))
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(config, override.split("; "))


def test_mrl_data_shows_what_is_learnt(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", str(write(tmp_path, tiny_models("llama"))), "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "data.train: 12 prompts" in shown and "data.validation: 8 prompts" in shown
    assert re.search(r"--> \d+ tokens, including EOS\n\d+$", shown)
