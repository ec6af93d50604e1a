"""Preferences of rows with images: `trainer: reward_model` and `dpo`, resuming after a kill, exports compared with
transformers and used as the reward of PPO, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from mrl import cli
from mrl.config.loader import ConfigError, load
from mrl.core import Prompt, Request, Sample
from mrl.reward.score_requests import ScoreRequest
from mrl.trainers.rl.reward_scores import to_score
from tests.helpers import zygote
from tests.helpers.runs import difference, results, train, train_and_kill
from tests.helpers.tiny import make_tiny
from tests.helpers.tiny_vl import END, IMAGE, START, make_tiny_vl
from tests.helpers.vision_rows import vision_settings, write_rows

pytestmark = pytest.mark.long

SPELLED = "<|vision_start|><|image_pad|><|vision_end|>"
SEEN = (0, 3)  # rows with one opaque RGB image
CHOSEN, REJECTED = "yes", "no."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes six pairs with images, one of them with inline images. The held-out rows are the same in reverse order."""
    root = tmp_path_factory.mktemp("vision_preferences")
    write_rows(root, inline=(0,))
    rows = [json.loads(line) for line in (root / "rows.jsonl").read_text().splitlines()]
    pairs = [row | {"chosen": CHOSEN * (i + 1), "rejected": REJECTED} for i, row in enumerate(rows)]
    write_jsonl(root / "pairs.jsonl", pairs)
    write_jsonl(root / "held_out.jsonl", pairs[::-1])
    write_jsonl(root / "rows_held_out.jsonl", rows[::-1])
    make_tiny_vl(root / "model", "qwen3_vl")
    return root


def write_jsonl(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(folder: Path, trainer: str, **more: Any) -> dict[str, Any]:
    return {
        "trainer": trainer,
        "run": {"name": trainer, "root": str(folder / "runs"), "steps": 4, "nproc": 2, "trackers": []},
        "model": {"path": str(folder / "model"), "dtype": "float32", "vision": {"train": True}},
        "actor": {"parallel": {"tensor": 2}, "optimizer": {"lr": 2e-3}, "max_tokens_per_microbatch": 120},
        "data": {
            "train": str(folder / "pairs.jsonl"),
            "validation": str(folder / "held_out.jsonl"),
            "max_prompt_tokens": 100,
            "max_tokens": 130,
        },
        "batch": {"rows_per_step": 4},
        "validation": {"every_steps": 2},
        "checkpoint": {"every_steps": 2, "export_hf": True},
        **more,
    }


def write(folder: Path, config: dict[str, Any]) -> Path:
    file = folder / f"{config['run']['name']}.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.fixture(scope="module")
def rewarded(folder: Path) -> Path:
    """Trains a reward model with its vision tower at TP2; returns the run directory."""
    train(folder, write(folder, settings(folder, "reward_model")), "run.name=whole")
    return folder / "runs/whole"


@torch.no_grad()
def theirs(model: Path, texts: list[tuple[str, list[Image.Image]]]) -> list[float]:
    """Returns the scores of transformers' body with the exported head and processor, one text at a time. Each text
    marks the places of its images."""
    body = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    with safe_open(model / "model.safetensors", "pt") as file:
        head = file.get_tensor("score.weight")
    tokenizer, processor = (
        AutoTokenizer.from_pretrained(model),
        AutoImageProcessor.from_pretrained(model, backend="pil"),
    )
    found = []
    for text, pictures in texts:
        inputs = dict(processor(images=pictures, return_tensors="pt"))
        counts = iter((inputs["image_grid_thw"].prod(1) // 4).tolist())
        ids = [
            token
            for each in tokenizer(text, add_special_tokens=False)["input_ids"]
            for token in ([each] * next(counts) if each == IMAGE else [each])
        ]
        row = torch.tensor([ids])
        hidden = body(input_ids=row, mm_token_type_ids=(row == IMAGE).int(), **inputs).last_hidden_state
        found.append(float(hidden[0, -1] @ head[0]))
    return found


def picture(folder: Path, row: int) -> Image.Image:
    return Image.open(folder / f"{row}_0.png").convert("RGB")


@pytest.mark.slow
def test_a_killed_reward_model_is_the_same_run(rewarded: Path, folder: Path) -> None:
    """A reward model's run killed after step 3 resumes bit for bit."""
    config, killed = write(folder, settings(folder, "reward_model")), folder / "runs/killed"
    train_and_kill(folder, killed, config, "run.name=killed", "run.steps=50")
    train(folder, config, "run.name=killed", "run.steps=4")
    assert results(killed) == results(rewarded) and set(difference(rewarded, killed).values()) == {0.0}


def test_a_reward_model_learns_with_its_tower(rewarded: Path, folder: Path) -> None:
    rows = results(rewarded)
    assert rows[4]["validation/loss"] < rows[0]["validation/loss"] and rows[0]["validation/rewards/accuracies"] == 0
    with (
        safe_open(folder / "model/model.safetensors", "pt") as before,
        safe_open(rewarded / "hf/model.safetensors", "pt") as after,
    ):
        name = "model.visual.patch_embed.proj.weight"
        assert not before.get_tensor(name).equal(after.get_tensor(name)), "the tower is trained"
        assert after.get_tensor("score.weight").any() and "lm_head.weight" not in set(after.keys())


@pytest.mark.slow
def test_what_is_reported_is_what_transformers_scores(rewarded: Path, folder: Path, tmp_path: Path) -> None:
    """The reported scores equal those of transformers, for rows with opaque images. One more run, which starts from the
    export and changes nothing, reports them."""
    kept = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    write_jsonl(folder / "opaque.jsonl", [kept[3]])
    config = settings(folder, "reward_model", checkpoint={}, validation={"every_steps": 1})
    config["run"] |= {"name": "again", "steps": 1}
    config["model"]["path"] = str(rewarded / "hf")
    config["data"]["validation"] = str(folder / "opaque.jsonl")
    train(folder, write(folder, config))
    first = results(folder / "runs/again")[0]
    texts = [(f"{SPELLED}what?{said}</s>", [picture(folder, 3)]) for said in (CHOSEN * 4, REJECTED)]
    chosen, rejected = theirs(rewarded / "hf", texts)
    assert abs(chosen - rejected) > 1e-2
    assert first["validation/rewards/chosen"] == pytest.approx(chosen, abs=2e-5)
    assert first["validation/rewards/rejected"] == pytest.approx(rejected, abs=2e-5)


def test_mrl_eval_reward_scores_as_transformers(
    rewarded: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["eval", "reward", rewarded / "hf", folder / "pairs.jsonl", "--no-chat-template", "--compare"]
    assert cli.main([*map(str, ask), "--json", str(tmp_path / "found.json")]) == 0
    assert "transformers: the scores of 6 rows differ by" in capsys.readouterr().out
    last, found = results(rewarded)[4], json.loads((tmp_path / "found.json").read_text())
    assert found["margin"] == pytest.approx(last["validation/rewards/margins"], rel=1e-4)


@pytest.mark.slow
def test_a_checkpoint_is_converted_and_the_card_says_how_it_is_loaded(rewarded: Path, tmp_path: Path) -> None:
    step = rewarded / "checkpoints/step_4"
    done = zygote.run("mrl", "convert", "megatron-to-hf", step, tmp_path / "hf", "--verify", timeout_s=120)
    assert done.returncode == 0 and "the same model" in done.stdout, done.stderr
    converted, exported = (load_file(path / "model.safetensors") for path in (tmp_path / "hf", rewarded / "hf"))
    assert converted.keys() == exported.keys()
    assert all(converted[name].equal(tensor) for name, tensor in exported.items())
    card = (rewarded / "hf/README.md").read_text()
    assert "import AutoModel, AutoProcessor" in card and "`score.weight`" in card and "sglang.launch" not in card


@pytest.mark.slow
def test_ppo_is_rewarded_by_it_under_another_layout(rewarded: Path, folder: Path) -> None:
    """PPO uses the model as its reward under another layout, and starts its critic from it. The reward model gets the
    images of training and validation rows, whose row numbers differ."""
    judge = rewarded / "hf"
    reward = {"manager": "model", "model": {"path": str(judge), "parallel": {"pipeline": 2}}}
    critic = {"path": str(judge), "optimizer": {"lr": 0.005}, "max_tokens_per_microbatch": 150}
    more = {
        "reward": reward,
        "critic": critic,
        "algorithm": {"adv_estimator": "gae"},
        "validation": {"prompts": 6, "every_steps": 1, "temperature": 1.0},
    }
    config = vision_settings(folder, folder / "model", "ppo", {"tensor": 2}, **more)
    config["run"] |= {"steps": 1, "trackers": []}
    config["data"]["validation"] = str(folder / "rows_held_out.jsonl")
    config["data"]["chat_template"] = False
    config["batch"]["samples_per_prompt"], config["rollout"]["sampling"]["max_new_tokens"] = 8, 1
    train(folder, write(folder, config))
    files = {file.stem: file for file in (folder / "runs/ppo/rollouts").glob("*.jsonl")}
    assert {"step_1", "validation_step_1"} <= files.keys()
    told = [json.loads(line) for file in files.values() for line in file.read_text().splitlines()]
    own = [each for each in told if each["row"]["images"] == ["3_0.png"] and is_text(each)]
    assert own
    texts = [(each["prompt"] + each["response"], [picture(folder, 3)]) for each in own]
    assert [each["score"] for each in own] == pytest.approx(theirs(judge, texts), rel=1e-4, abs=1e-4)
    assert len({round(each["score"], 4) for each in told}) > 6


def is_text(sample: dict[str, Any]) -> bool:
    """Returns True if the response's text contains all of its tokens: bytes and an EOS."""
    said = sample["response"]
    return bool(said.isascii() and len(said.removesuffix("</s>")) + said.endswith("</s>") == sample["tokens"])


@pytest.mark.slow
def test_dpo_learns_from_rows_with_pictures(folder: Path) -> None:
    config = settings(folder, "dpo", actor={"parallel": {"pipeline": 2}, "optimizer": {"lr": 2e-3}})
    train(folder, write(folder, config), "checkpoint.export_hf=false")
    rows = results(folder / "runs/dpo")
    assert rows[1]["dpo/first_gap"] < 1e-4, "policy and reference see the same"
    assert rows[4]["validation/loss"] < rows[0]["validation/loss"] and rows[4]["validation/rewards/accuracies"] == 1


def test_mrl_data_shows_pairs_with_their_pictures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(folder, settings(folder, "reward_model"))
    sheet = ["--samples", "6", "--sheet", str(tmp_path / "sheet.png")]
    assert cli.main(["data", str(config), *sheet]) == 0
    shown = capsys.readouterr().out
    assert "6 images: " in shown and f"{SPELLED}what?" in shown and "image: resized to" in shown
    with Image.open(tmp_path / "sheet.png") as drawn:
        assert drawn.width > 2 * 192 and drawn.height > 4 * 192
    nowhere = tmp_path / "none" / "sheet.png"
    assert cli.main(["data", str(config), "--sheet", str(nowhere)]) == 1
    assert capsys.readouterr().err == f"{nowhere} cannot be written: No such file or directory\n"


TWO = {"images": ["3_0.png", "3_0.png"]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"images": ["../model/config.json"]}, "is outside of"),
        ({"images": ["https://host/a.png"]}, "mrl downloads no images"),
        (TWO, "the prompt has 1 image placeholders (<image>), and the row 2 images"),
        ({"prompt": None, "chosen": "<image>a", "rejected": "<image>b"}, "1 images, but no 'prompt'"),
        ({"rejected": "say <|image_pad|>"}, "the prompt has 2 image tokens"),
        ({"images": ["3_0.png"] * 9, "prompt": "?"}, "9 images, more than data.max_images=8"),
    ],
)
def test_a_pair_that_cannot_be_used_is_named(
    folder: Path, row: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good = json.loads((folder / "pairs.jsonl").read_text().splitlines()[3])
    write_jsonl(folder / "wrong.jsonl", [good, good | row])
    config = write(folder, settings(folder, "reward_model"))
    assert cli.main(["data", str(config), f"data.train={folder / 'wrong.jsonl'}"]) == 1
    assert "wrong.jsonl:2: " in (found := capsys.readouterr().err) and said in found


@pytest.mark.parametrize(
    ("trainer", "override", "said"),
    [
        ("reward_model", "data.truncation=left", "could truncate inside an image"),
        ("reward_model", "actor.lora={rank: 4}", "actor.lora: is not supported for vision models"),
        ("dpo", "ref.policy=cached", "does not detect changed images"),
        ("dpo", "preference.loss={sigmoid: {}, sft: {with_prompt: true}}", "trains on whole prompts"),
    ],
)
def test_what_is_not_there_is_refused(folder: Path, trainer: str, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(write(folder, settings(folder, trainer)), [override])
    assert said in str(refused.value)


def make_judge(directory: Path) -> Path:
    """Makes a vision-language model that is a reward model by its config.json."""
    config = json.loads((make_tiny_vl(directory, "qwen3_vl") / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3VLForSequenceClassification"]}))
    return directory


def test_a_judge_may_see_what_the_actor_does_not(folder: Path, tmp_path: Path) -> None:
    """The reward model may see images that the actor does not. Then no key of images has an effect."""
    text = make_tiny(tmp_path / "text", "qwen3", vocab_size=320)
    reward = {"manager": "model", "model": {"path": str(make_judge(tmp_path / "judge"))}}
    config = vision_settings(folder, text, "blind", {"tensor": 2}, reward=reward)
    config["model"].pop("vision")
    config["data"]["chat_template"] = False
    assert load(file := write(folder, config)).reward.model is not None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"data.max_images: has no effect: the model reads no images"):
        load(file, ["data.max_images=2"])


def test_a_judge_whose_processor_makes_other_numbers_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = make_judge(tmp_path / "judge")
    processor = json.loads((judge / "preprocessor_config.json").read_text()) | {"image_std": [0.25] * 3}
    (judge / "preprocessor_config.json").write_text(json.dumps(processor))
    reward = {"manager": "model", "model": {"path": str(judge)}}
    config = vision_settings(folder, folder / "model", "other", {"tensor": 2}, reward=reward)
    assert cli.main(["data", str(write(folder, config))]) == 1
    assert "differs from model.path's in image_std" in capsys.readouterr().err


def sample(prompt: Prompt, *response: int) -> Sample:
    return Sample(Request(0, 0, prompt, 1), np.array(response), [0.0] * len(response), "stop", "0")


def test_what_models_and_servers_of_text_alone_are_told_of_a_picture() -> None:
    """Text-only reward models and servers get one image token per image. One in a response is no image."""
    seen = Prompt(4, (5, START, IMAGE, IMAGE, END), {}, images=((2, 4, 7),),
                  unexpanded_token_ids=(5, START, IMAGE, END), picture_row=9)  # fmt: skip
    one, plain = sample(seen, IMAGE, 8), sample(Prompt(0, (5, 6), {}), IMAGE)
    assert (
        ScoreRequest("", "", {}, sample=one).token_ids == [5, START, IMAGE, END, IMAGE, 8]
        and ScoreRequest("", "", {}).token_ids == []
    )
    assert to_score([one], sees=False).texts.tokens.tolist() == [5, START, IMAGE, END, IMAGE, 8]
    texts = to_score([one], sees=True).texts
    assert texts.images is not None and texts.images.tolist() == [[2, 4, 7]] and texts.rows is not None
    assert texts.rows.tolist() == [9] and texts.prompt_lens.tolist() == [5]
    blind = to_score([plain], sees=True).texts
    assert blind.images is None and blind.prompt_lens.tolist() == [1]
