"""`trainer: sft`: early stopping, refusals, and the output of `mrl data`."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from mrl import cli
from mrl.config.loader import ConfigError, load
from mrl.config.schema import HeldOutConfig, SFTConfig
from mrl.data.open_data import with_steps
from mrl.trainers.shared.best_validation import BestValidation
from tests.conftest import TinyModels
from tests.helpers.sft_config import write


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


def test_a_validation_has_the_time_of_a_rollout(tiny_models: TinyModels, tmp_path: Path) -> None:
    config, own = write(tmp_path, tiny_models("llama")), ("run.launcher=ft", "resilience.timeouts_s.rollout=7200.0")
    assert load(config, own).resilience.timeouts_s.rollout == 7200
    with pytest.raises(ConfigError, match="resilience.timeouts_s.sync: has no effect: trainer sft does not generate"):
        load(config, [*own, "resilience.timeouts_s.sync=60.0"])
    without = ["data.validation=null", "validation=null"]
    with pytest.raises(ConfigError, match="resilience.timeouts_s.rollout: has no effect: trainer sft does not"):
        load(config, [*own, *without])


def test_mrl_data_shows_what_is_learnt(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", str(write(tmp_path, tiny_models("llama"))), "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "data.train: 12 prompts" in shown and "data.validation: 8 prompts" in shown
    assert re.search(r"--> \d+ tokens, including EOS\n\d+$", shown)
