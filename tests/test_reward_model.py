"""A reward model that Megatron runs gives transformers' scores, under every layout."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tiny import make_tiny
from transformers import AutoConfig, AutoModelForSequenceClassification

from mrl.config.schema import RewardConfig
from mrl.reward import RewardManager
from tests.world import run_world

LAYOUTS = [{"tensor": 2}, {"pipeline": 2}, {"context": 2}, {}]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward_model")
    make_tiny(folder / "policy", "qwen2")
    config = AutoConfig.from_pretrained(folder / "policy", num_labels=1, tie_word_embeddings=False)
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "reward")
    return folder / "reward"


@torch.no_grad()
def test_scores_are_those_of_transformers_under_every_layout(reward_model: Path, tmp_path: Path) -> None:
    draw = random.Random(1)
    sequences = [[draw.randrange(3, 250) for _ in range(length)] for length in (2, 40, 7, 8, 63, 5, 30)]
    asked, result = tmp_path / "sequences.json", tmp_path / "result.json"
    asked.write_text(json.dumps(sequences))
    run_world(2, "reward_model.py", reward_model, asked, result, json.dumps(LAYOUTS))
    theirs = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32).eval()
    wanted = torch.tensor([theirs(torch.tensor([ids])).logits.item() for ids in sequences])
    assert wanted.std() > 0.01
    for layout, scores in zip(LAYOUTS, json.loads(result.read_text()), strict=True):
        gap = float((torch.tensor(scores) - wanted).abs().max() / wanted.abs().max())
        assert gap < 1e-4, (layout, scores, wanted)


def test_a_model_in_a_recipe_and_a_score_that_is_none() -> None:
    from test_reward_managers import of

    recipe = {"chat": {"model": 0.5, "exact_match": 1.0}, "*": {"exact_match": 1.0}}
    cfg = {"manager": "recipe", "recipe": recipe, "model": {"path": "-"}, "on_error": "zero", "workers": 1}
    samples = [of("chat", 0, tokens=2), of("chat", 1, tokens=3), of("quiz", 2)]
    with RewardManager(RewardConfig.model_validate(cfg)) as manager:
        manager.use_model(lambda sequences: [4.0 if len(ids) == 3 else float("nan") for ids in sequences])
        manager.collect(samples)
    assert [s.score for s in samples] == [3.0, 0.0, 1.0]
    assert samples[0].score_parts == {"model": 4.0, "exact_match": 1.0}
    assert "reward model on sample 1 " in samples[1].reward_error and "got nan" in samples[1].reward_error
