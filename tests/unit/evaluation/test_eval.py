"""`mrl eval`: pass@k and maj@k with intervals, and held-out rows as in training, by a command."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from mrl import cli
from mrl.core import Prompt, Request, Sample
from mrl.evaluation.answers import summary
from mrl.evaluation.estimates import Estimate, majority_at, pass_at
from mrl.evaluation.show import lines, page
from tests.conftest import TinyModels
from tests.helpers.sft_config import write
from tests.helpers.slow import slow_cases
from tests.helpers.train_tools import write_config


def judge(tiny_models: TinyModels, folder: Path) -> Path:
    made = AutoModelForSequenceClassification.from_pretrained(tiny_models("llama"), num_labels=1, pad_token_id=0)
    made.save_pretrained(folder / "judge")
    AutoTokenizer.from_pretrained(tiny_models("llama")).save_pretrained(folder / "judge")
    return folder / "judge"


@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_all_choices_of_k(k: int) -> None:
    right = [0, 1, 3, 5]
    each = [np.mean([any(i < c for i in chosen) for chosen in combinations(range(5), k)]) for c in right]
    assert pass_at(k, right, 5).value == pytest.approx(np.mean(each))
    with pytest.raises(ValueError, match="pass@6 needs at least 6 samples a prompt, there are 5"):
        pass_at(6, right, 5)


def test_the_most_frequent_answer_counts_and_ties_are_shared() -> None:
    answers = [["4", "5", "4", "7"], ["1", "2", "3", "3"]]
    right = [[True, False, True, False], [True, False, False, False]]
    assert majority_at(4, answers, right).value == 0.5
    assert majority_at(2, answers, right).value == pytest.approx(np.mean([(0.5 + 0.5) / 2, (0.5 + 0) / 2]))
    assert majority_at(1, answers, right).value == pytest.approx(np.mean([0.5, 0.25]))


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    found = [Estimate.of(rng.random(200) < 0.3, seed=i) for i in (*range(20), *slow_cases(*range(20, 60)))]
    assert 0.85 * len(found) <= sum(e.low <= 0.3 <= e.high for e in found) and all(
        0.05 < e.high - e.low < 0.2 for e in found
    )
    alike = Estimate.of([0.5] * 9)
    assert (alike.low, alike.high) == (0.5, 0.5)


def test_what_is_shown_of_samples() -> None:
    scores = [[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.5]]
    samples = [
        Sample(Request(4 * g + i, g, Prompt(g, (1,), {}, f"<q{g}>"), 0), [3], [0.0], "stop", "0", f" {s:g}", s)
        for g, group in enumerate(scores)
        for i, s in enumerate(group)
    ]
    found = summary(samples, 4, right_from=1.0) | {"weights": "m", "data": "d"}
    values = {name: e["value"] for name, e in found["estimates"].items()}
    assert values == pytest.approx(
        {"mean_score": 3.5 / 8, "exact": 3 / 8, "pass@1": 3 / 8, "maj@1": 3 / 8}
        | {"pass@2": 0.5, "maj@2": (0.5 + 1) / 4, "pass@4": 0.5, "maj@4": 0.5}
    )
    samples[0].reward_error = "the server is down"
    assert summary(samples, 4, right_from=1.0)["estimates"]["failed"]["value"] == 1 / 8
    text = "\n".join(lines(found))
    assert "pass@4" in text and "0.5000" in text and " - " in text
    assert "&lt;q0&gt;" in page(found) and "95 % interval" in page(found)


def test_an_error_of_the_system_that_names_no_file(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no more of anything")

    monkeypatch.setattr("mrl.evaluation.held_out.held_out", broken)
    assert cli.main(["eval", str(write(tmp_path, tiny_models("llama")))]) == 1
    assert "mrl: no more of anything" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rows", "0"), "must be at least 1"),
        (("data.validation=null",), "data.validation is not set"),
        (("--lm-eval", "gsm8k", "--per-prompt", "2"), "--per-prompt has no effect: with --lm-eval the tasks define"),
        (("--lm-eval", "gsm8k", "--right-from", "0.5"), "--right-from has no effect: with --lm-eval"),
        (("--temperature", "0.5"), "--temperature has no effect: trainer sft generates no answers"),
        (("--right-from", "0.5"), "--right-from has no effect: trainer sft generates no answers"),
        (("--per-prompt", "4", "--temperature", "0"), "--per-prompt 4 has no effect with --temperature 0"),
        (("--recipes", "current"), "--recipes goes with --precision-report only"),
        (("--samples", "8"), "--samples goes with --precision-report only"),
        (("--precision-report", "--rows", "8"), "--rows does not go with --precision-report"),
        (("--precision-report", "--out", "there"), "--out does not go with --precision-report"),
        (("--lm-eval-path", "."), "beside --lm-eval"),
    ],
)
def test_what_cannot_be_evaluated_is_said(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    off = ["validation.patience=null", "validation.keep_best=false", "validation.min_delta=0.0"]
    off += ["validation.every_steps=100"]
    assert cli.main(["eval", str(write(tmp_path, tiny_models("llama"))), *off, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_harness_that_is_not_installed_is_named(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mrl.evaluation.lm_harness.find_spec", lambda name: None)
    assert cli.main(["eval", str(write(tmp_path, tiny_models("llama"))), "--lm-eval", "gsm8k"]) == 1
    assert "--lm-eval needs the package lm_eval, which is not installed: " in capsys.readouterr().err


# ---- answers


def sampling(folder: Path, model: Path, **keys: Any) -> Path:
    """Writes FOLDER/rl.yaml of a run that samples."""
    (folder / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    config: dict[str, Any] = {
        "trainer": "rl",
        "run": {"name": "run", "root": str(folder / "runs")},
        "model": {"path": str(model), "dtype": "float32"},
        "actor": {"max_tokens_per_microbatch": 512},
        "data": {
            "train": str(folder / "rows.jsonl"),
            "validation": str(folder / "rows.jsonl"),
            "max_prompt_tokens": 32,
        },
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4},
        "rollout": {"engine": "transformers", "sampling": {"max_new_tokens": 4}},
        "reward": {"function": "exact_match"},
        "algorithm": {"adv_estimator": "grpo"},
    }
    for key, section in keys.items():
        config[key] = {**config.get(key, {}), **section}
    (folder / "rl.yaml").write_text(yaml.safe_dump(config))
    return folder / "rl.yaml"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("pickles", "pickled has no *.safetensors, the only format that engines read"),
        ("converted", "converted is a Megatron checkpoint, and engines read safetensors"),
        ("urls", "rollout.urls: those engines have their own weights"),
        ("fp8", "rollout.quantization: an fp8 engine has no weights before a run syncs them"),
        ("reward model", "reward.model: it scores on the ranks of a run, and mrl eval has none"),
    ],
)
def test_no_engine_is_started_that_would_not_answer_with_the_weights(
    tiny_models: TinyModels,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    said: str,
) -> None:
    def start(*_: Any, **__: Any) -> None:
        pytest.fail("an engine is started")

    monkeypatch.setattr("mrl.evaluation.answers.start_engine", start)
    model, keys, words = tiny_models("llama", hidden_size=128, intermediate_size=256), {}, []
    if case in ("pickles", "converted"):
        (tmp_path / "pickled").mkdir()
        (tmp_path / "converted" / "release").mkdir(parents=True)
        words = ["--weights", str(tmp_path / {"pickles": "pickled"}.get(case, case))]
    elif case == "reward model":
        keys = {"reward": {"manager": "model", "function": None, "model": {"path": str(judge(tiny_models, tmp_path))}}}
    else:
        keys = {
            "rollout": {"urls": ["http://127.0.0.1:9"]}
            if case == "urls"
            else {"quantization": "fp8", "engine": "sglang"}
        }
    assert cli.main(["eval", str(sampling(tmp_path, model, **keys)), *words]) == 1
    assert said in capsys.readouterr().err


def test_weights_that_are_nowhere_are_named(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", str(sampling(tmp_path, tiny_models("llama"))), "--weights", "nowhere"]) == 2
    assert capsys.readouterr().err == "mrl: --weights nowhere: there is no such directory\n"


# ---- where the run is


def test_a_run_is_what_is_in_the_directory_that_is_named(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mrl.evaluation.held_out.held_out", lambda *_: {"validation/loss": 1.0})
    named, moved = tmp_path / "runs/run", tmp_path / "runs/run/earlier_1"
    for folder in (named, moved):
        (folder / "hf").mkdir(parents=True)
    write(moved, tiny_models("llama"), run={"root": str(tmp_path / "runs")})
    assert cli.main(["eval", str(moved)]) == 0
    assert json.loads((moved / "eval.json").read_text())["weights"] == str(moved / "hf")
    assert not (named / "eval.json").exists()

    sampling(tmp_path, tiny_models("llama")).rename(moved / "config.yaml")
    (moved / "hf").rmdir()
    assert cli.main(["eval", "--precision-report", str(moved)]) == 1
    assert f"{moved}/rollouts has no training samples" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "data"])
def test_a_run_of_several_machines_is_looked_at_from_one(
    tiny_models: TinyModels,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.setattr("mrl.evaluation.held_out.held_out", lambda *_: {"validation/loss": 1.0})
    config = write(tmp_path, tiny_models("llama"), run={"nodes": 2, "nproc": 2})
    assert cli.main([command, str(config)]) == 0, capsys.readouterr().err
    assert cli.main([command, str(config), "data.train=none.jsonl"]) == 2
    assert "'none.jsonl' is not on this machine" in capsys.readouterr().err


def test_a_run_of_several_adapters_has_no_weights_to_evaluate(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the refusal the base model would be evaluated in place of the adapters."""
    sections: dict[str, Any] = {"adapters": {"a": {}, "b": {}}, "sync": {"lora": "adapter"}}
    sections |= {"actor": {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}}
    config = write_config(tmp_path, tiny_models("llama"), **sections)
    for words in ([], ["--precision-report"]):
        assert cli.main(["eval", str(config), *words]) == 2
        assert "this run trains the adapters a, b: merge one with mrl merge" in capsys.readouterr().err
