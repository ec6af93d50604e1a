"""A reward model gives transformers' scores: run by Megatron under every layout, and served by SGLang."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
from pathlib import Path

import pytest
import torch
from tiny import make_tiny
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from mrl.config.schema import RewardConfig, RolloutConfig
from mrl.core import Prompt, Request, Sample
from mrl.ports import free_port
from mrl.reward import RewardManager
from mrl.rollout.launch import CPU, Launch, ServerSpec
from mrl.rollout.process import EngineProcess
from mrl.rollout.sglang.command import sglang_launch
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


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(3, 250) for _ in range(length)] for length in (2, 40, 7, 8, 63, 5, 30)]


@pytest.fixture(scope="module")
@torch.no_grad()
def wanted(reward_model: Path, sequences: list[list[int]]) -> Tensor:
    theirs = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32).eval()
    scores = torch.tensor([theirs(torch.tensor([ids])).logits.item() for ids in sequences])
    assert scores.std() > 0.01
    return scores


def gap(scores: list[float], wanted: Tensor) -> float:
    return float((torch.tensor(scores) - wanted).abs().max() / wanted.abs().max())


def test_megatron_gives_the_scores_of_transformers_under_every_layout(
    reward_model: Path, sequences: list[list[int]], wanted: Tensor, tmp_path: Path
) -> None:
    asked, result = tmp_path / "sequences.json", tmp_path / "result.json"
    asked.write_text(json.dumps(sequences))
    run_world(2, "reward_model.py", reward_model, asked, result, json.dumps(LAYOUTS))
    for layout, scores in zip(LAYOUTS, json.loads(result.read_text()), strict=True):
        assert gap(scores, wanted) < 1e-4, (layout, scores, wanted)


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="the engine tests need sglang")
def test_a_real_server_gives_the_scores_of_transformers_less_a_constant_that_is_told(
    reward_model: Path, sequences: list[list[int]], wanted: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang as a user starts it for a reward model, with --is-embedding."""
    cfg, port = RolloutConfig(server_args=("--is-embedding",)), free_port()

    def launch(folder: Path) -> Launch:
        return sglang_launch(ServerSpec(cfg, str(reward_model), "float32", port, 0, 0, CPU, folder=folder))

    with contextlib.closing(EngineProcess("rm", launch, port, tmp_path / "log")) as server:
        server.wait_ready(300)
        reward = {"manager": "model", "servers": {"rm": {"url": server.url, "api": "sglang", "timeout_s": 60.0}}}
        samples = [
            Sample(Request(i, i, Prompt(i, tuple(ids[:1]), {"prompt": "-"}), i), ids[1:], [], "stop", "0", "-")
            for i, ids in enumerate(sequences)
        ]
        with RewardManager(RewardConfig.model_validate(reward)) as manager:
            manager.collect(samples)
    found = torch.tensor([sample.score for sample in samples])
    assert gap((found - found.mean() + wanted.mean()).tolist(), wanted) < 1e-4, (found, wanted)
    assert "serves a Qwen2ForSequenceClassification, whose score head has a bias in SGLang" in caplog.text


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
