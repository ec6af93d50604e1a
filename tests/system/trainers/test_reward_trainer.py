"""`trainer: reward_model` as a user runs it: metrics, resuming after a kill, scores of its export in transformers and
as the reward of PPO, every form of data, and refusals."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from mrl import cli
from mrl.config.loader import ConfigError, load
from tests.helpers import zygote
from tests.helpers.nonfinite import LETTER, letter_model, lines
from tests.helpers.reward_model_config import rows_of, write
from tests.helpers.runs import difference, results, train, train_and_kill
from tests.helpers.train_tools import ROOT, Train, write_config
from tests.system.launcher.test_survival import FAULTS, KINDS
from tests.system.trainers.test_resume import TinyModels

pytestmark = pytest.mark.longest

RUN_S = 400.0
MATRIX: list[dict[str, Any]] = [
    {"kind": "kill", "section": "update", "rank": 1, "nth": 2},
    {"kind": "kill", "section": "checkpoint", "rank": 0, "nth": 2},
]  # test_survival.py covers exceptions and hangs, for which the launcher does the same for every trainer
LOSSES = (("lists", "plackett_luce"), ("lists", "pairwise"), ("scores", "regression"))
LIMITS = {"setup": 40.0, "update": 12.0, "checkpoint": 12.0, "out_of_section": 40.0}


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a Qwen with two heads and margins at TP2; returns the folder."""
    folder = tmp_path_factory.mktemp("reward_trainer")
    own = {"heads": 2, "head_start": "normal", "center_rewards_coefficient": 0.01, "use_margin": True}
    actor = {"optimizer": {"lr": 1e-3}, "parallel": {"tensor": 2}, "max_tokens_per_microbatch": 60}
    checkpoint = {"every_steps": 1, "export_hf": True}
    validation = {"every_steps": 2, "metric": "rewards/margins", "patience": 3, "keep_best": True}
    config = write(
        folder, tiny_models("qwen2", tied=True), reward_model=own, actor=actor, checkpoint=checkpoint,
        validation=validation,
    )  # fmt: skip
    train(folder, config, "run.name=whole")
    return folder


@torch.no_grad()
def scores_of(model: Path, texts: list[str]) -> Tensor:
    """Returns transformers' scores, [texts, heads], of all texts in one batch, padded as the export configures."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    theirs = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    return theirs(batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def test_killed_and_started_again_is_the_same_run_to_the_bit(folder: Path) -> None:
    whole, killed, config = folder / "runs/whole", folder / "runs/killed", folder / "config.yaml"
    train_and_kill(folder, killed, config, "run.name=killed", "run.steps=50")
    train(folder, config, "run.name=killed")
    assert results(killed) == results(whole) and list(results(whole)) == [0, 1, 2, 3, 4]
    assert set(difference(whole, killed).values()) == {0.0}


@pytest.mark.slow
def test_every_fault_is_answered_and_it_is_the_same_run_to_the_bit(folder: Path) -> None:
    """The run survives ranks that die before and after the first checkpoint, with bitwise equal results."""
    (folder / "faults.json").write_text(json.dumps(MATRIX))
    more = [f"run.max_restarts={len(MATRIX)}", "run.launcher=ft", f"resilience.timeouts_s={json.dumps(LIMITS)}"]
    environment = {"PYTHONPATH": f"{FAULTS}:{ROOT}", "MRL_TEST_FAULTS": str(folder / "faults.json")}
    with Train(folder, folder / "config.yaml", "run.name=disturbed", *more, **environment) as run:
        assert run.wait(RUN_S) == 0, run.terminal[-6000:]
        assert run.left_running() == {}
    whole, disturbed = (folder / "runs" / name for name in ("whole", "disturbed"))
    rows = [json.loads(line) for line in (disturbed / "logs/restarts.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["section"]) for row in rows] == [(KINDS[f["kind"]], f["section"]) for f in MATRIX]
    assert results(disturbed) == results(whole) and list(results(whole)) == [0, 1, 2, 3, 4]
    assert set(difference(whole, disturbed).values()) == {0.0}


@pytest.mark.slow
def test_a_pair_whose_loss_is_not_finite_is_named_and_skipped(tmp_path: Path) -> None:
    """A pair with a non-finite loss is named and skipped. Only its chosen response is at fault."""
    config = write(tmp_path, letter_model(tmp_path))
    data = tmp_path / "pairs.jsonl"
    rows = rows_of("pairs")
    rows[7]["chosen"] = LETTER + rows[7]["chosen"]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    calm = ("data.validation=null", "validation.every_steps=100", "checkpoint.every_steps=100")
    train(tmp_path, config, "data.shuffle=false", *calm, "run.steps=3")
    told = [(line["step"], line["by"], line["sample_ids"], line["rows"]) for line in lines(tmp_path / "runs/run")]
    assert told == [(2, "outputs", [2], [7])]


def test_what_is_reported(folder: Path) -> None:
    rows = results(folder / "runs/whole")
    assert [step for step, row in rows.items() if "validation/loss" in row] == [0, 2, 4]
    assert rows[4]["validation/loss"] < rows[0]["validation/loss"]
    best = max((2, 4), key=lambda step: rows[step]["validation/rewards/margins"])
    assert os.readlink(folder / "runs/whole/checkpoints/best") == f"step_{best}"
    assert (folder / "runs/whole/hf_best/model.safetensors").is_file()
    assert rows[4]["validation/rewards/accuracies"] > rows[0]["validation/rewards/accuracies"]
    found = {"mean", "min", "max", "std", "chosen", "rejected", "margins", "length_correlation", "heads_std"}
    assert {f"rewards/{name}" for name in found} <= rows[1].keys()
    assert {f"rewards/accuracies/{name}" for name in ("source/a", "source/b", "chosen_longer")} <= rows[2].keys()
    assert rows[1]["rewards/margins"] == pytest.approx(rows[1]["rewards/chosen"] - rows[1]["rewards/rejected"])


def test_the_export_scores_the_same_in_transformers(folder: Path) -> None:
    """The export scores the same in transformers, for the whole batch at once; its padding token is not EOS."""
    texts = [row["prompt"] + row[half] + "</s>" for row in rows_of("pairs") for half in ("chosen", "rejected")]
    scores = scores_of(folder / "runs/whole/hf", texts).mean(1).double()
    last = results(folder / "runs/whole")[4]
    assert float(scores[0::2].mean()) == pytest.approx(last["validation/rewards/chosen"], abs=1e-5)
    assert float(scores[1::2].mean()) == pytest.approx(last["validation/rewards/rejected"], abs=1e-5)
    assert float(scores.min()) == pytest.approx(last["validation/rewards/min"], abs=1e-5)


def test_the_export_is_what_engines_want(folder: Path) -> None:
    exported = folder / "runs/whole/hf"
    config, tensors = json.loads((exported / "config.json").read_text()), load_file(exported / "model.safetensors")
    assert config["architectures"] == ["Qwen2ForSequenceClassification"] and len(config["id2label"]) == 2
    assert tensors["score.weight"].shape == (2, 64) and not tensors["score.bias"].any()
    assert "lm_head.weight" not in tensors and config["pad_token_id"] != config["eos_token_id"]


def test_a_checkpoint_of_two_heads_is_converted_with_both(folder: Path, tmp_path: Path) -> None:
    run_dir = folder / "runs/whole"
    step = run_dir / "checkpoints/step_4"
    done = zygote.run("mrl", "convert", "megatron-to-hf", step, tmp_path / "hf", timeout_s=120)
    assert done.returncode == 0, done.stderr
    converted, exported = (load_file(path / "model.safetensors") for path in (tmp_path / "hf", run_dir / "hf"))
    assert converted.keys() == exported.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in exported.items())
    assert len(json.loads((tmp_path / "hf/config.json").read_text())["id2label"]) == 2


def test_going_on_from_its_head(folder: Path, tiny_models: TinyModels) -> None:
    """Another run that starts from the export, head included, has its scores before the first step."""
    own = {"center_rewards_coefficient": 0.01, "use_margin": True, "head_start": "checkpoint"}
    config = write(folder, folder / "runs/whole/hf", name="on.yaml", reward_model=own)
    train(folder, config, "run.name=on", "run.steps=1", "checkpoint.every_steps=null")
    first, last = results(folder / "runs/on")[0], results(folder / "runs/whole")[4]
    assert {k: v for k, v in first.items() if k.startswith("validation/")} == pytest.approx(
        {k: v for k, v in last.items() if k.startswith("validation/")}, rel=1e-4, abs=1e-5
    )
    with pytest.raises(ConfigError, match=re.escape("3 heads, but the head of")):
        load(config, ["reward_model.heads=3"])


def test_ppo_is_rewarded_by_it(folder: Path, tiny_models: TinyModels) -> None:
    """The workflow of docs/reward_models.md: a reward model from pairs, then PPO with it, the critic started from the
    policy. The lower score of the two heads counts."""
    _, ppo = blocks()
    write_config(folder, tiny_models("qwen2", tied=True))  # writes the prompts
    (folder / "ppo.yaml").write_text(ppo)
    judge = folder / "runs/whole/hf"
    smaller = [
        *(f"run.root={folder / 'runs'}", "run.steps=1", f"model.path={tiny_models('qwen2', tied=True)}"),
        *("model.dtype=float32", "critic.path=null", f"reward.model.path={judge}", "reward.model.heads=min"),
        *(f"data.train={folder / 'train.jsonl'}", "data.max_prompt_tokens=32", "run.trackers=[]"),
        *("batch={prompts_per_step: 8, samples_per_prompt: 4}", "rollout.engine=transformers"),
        *("rollout.sampling.max_new_tokens=1", "actor.parallel.tensor=1"),
    ]
    train(folder, folder / "ppo.yaml", *smaller)
    [row] = [row for row in results(folder / "runs/ppo").values() if "reward/mean" in row]
    [file] = (folder / "runs/ppo/rollouts").glob("*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    ended = [s for s in samples if s["response"].isascii() and len(s["response"]) == s["tokens"]]  # all tokens are text
    assert ended
    texts = [sample["prompt"] + sample["response"] for sample in ended]
    found = [float(scores_of(folder / "runs/whole/hf", [text]).amin()) for text in texts]
    assert row["reward/mean"] == pytest.approx(sum(s["score"] for s in samples) / len(samples), rel=1e-5)
    assert [sample["score"] for sample in ended] == pytest.approx(found, rel=1e-3, abs=1e-4)


def blocks() -> list[str]:
    """Returns the configurations in docs/reward_models.md."""
    return re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/reward_models.md").read_text(), re.DOTALL)


@pytest.mark.slow
def test_adapters_and_a_head_are_a_reward_model_too(tiny_models: TinyModels, tmp_path: Path) -> None:
    actor = {"optimizer": {"lr": 1e-2}, "lora": {"rank": 4}}
    config = write(tmp_path, tiny_models("llama"), actor=actor)
    train(tmp_path, config, "run.steps=6", "checkpoint.every_steps=null")
    last = results(tmp_path / "runs/run")[6]
    assert last["validation/loss"] < math.log(2)
    texts = [row["prompt"] + row["chosen"] + "</s>" for row in rows_of("pairs")]
    scores = scores_of(tmp_path / "runs/run/hf", texts)
    assert float(scores.mean()) == pytest.approx(last["validation/rewards/chosen"], abs=1e-4)


def test_mrl_eval_reward_has_the_table_the_json_and_the_exit_code(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mrl eval reward` on data in RewardBench's forms, with subsets by name and several rejected responses."""
    model = str(folder / "runs/whole/hf")
    pairs = rows_of("pairs")
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(row | {"subset": "hep-go"}) + "\n" for row in pairs))
    several = [row | {"chosen": [row["chosen"]], "rejected": [row["rejected"], "?", "??"]} for row in pairs]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in several))
    ask = ["eval", "reward", model, str(tmp_path / "one.jsonl"), "--no-chat-template", "--json"]
    assert cli.main([*ask, str(tmp_path / "found.json"), "--compare"]) == 0
    shown, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    last = results(folder / "runs/whole")[4]
    assert found["accuracy"] == pytest.approx(last["validation/rewards/accuracies"])
    assert found["margin"] == pytest.approx(last["validation/rewards/margins"], rel=1e-4)
    assert found["length_correlation"] == pytest.approx(last["validation/rewards/length_correlation"], abs=1e-4)
    assert re.search(r"hep-go +12 ", shown) and re.search(r"12 rows differ by at most \d\.?\d*e-0[5-9]", shown)
    assert found["scored"][2]["row"].endswith("one.jsonl:3") and found["final"] is None
    ask[3] = str(tmp_path / "two.jsonl")
    assert cli.main([*ask, str(tmp_path / "found.json"), "--at-least", "1.0"]) in (0, 1)
    harder = json.loads((tmp_path / "found.json").read_text())
    assert harder["accuracy"] <= found["accuracy"] and len(harder["scored"][0]["scores"]) == 4


@pytest.mark.parametrize(
    ("form", "loss"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in LOSSES),
        ("steps", "process"),
    ],
)
def test_other_losses_learn_from_their_data(form: str, loss: str, tiny_models: TinyModels, tmp_path: Path) -> None:
    config = write(tmp_path, tiny_models("llama"), form, reward_model={"loss": loss}, actor={"optimizer": {"lr": 3e-3}})
    train(tmp_path, config, "run.steps=12", "checkpoint.every_steps=null", "validation.every_steps=6")
    rows = results(tmp_path / "runs/run")
    assert rows[12]["validation/loss"] < 0.6 * rows[0]["validation/loss"]
    assert math.isfinite(rows[12]["rewards/length_correlation"])
    exported = tmp_path / "runs/run/hf"
    name = "LlamaForTokenClassification" if form == "steps" else "LlamaForSequenceClassification"
    assert json.loads((exported / "config.json").read_text())["architectures"] == [name]
    if form == "steps":
        assert rows[12]["validation/rewards/accuracies"] > 0.9
        model = AutoModelForTokenClassification.from_pretrained(exported).eval()
        ids = AutoTokenizer.from_pretrained(exported)("2:20\n21\n22\n", return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            logits = model(ids["input_ids"]).logits[0, :, 0]
        assert [bool(logits[place] > 0) for place in (4, 7, 10)] == [True, False, False]
    else:
        assert rows[12]["rewards/std"] > 0
