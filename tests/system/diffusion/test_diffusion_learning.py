"""DDPO increases the reward; the same rewards shuffled among the images do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers", reason="pip install 'mrl[diffusion]'")

from mrl.config.sections.diffusion import DiffusionLossConfig, DiffusionModelConfig, SamplerConfig  # noqa: E402
from mrl.config.sections.models import OptimizerConfig  # noqa: E402
from mrl.diffusion.advantages import of_batch  # noqa: E402
from mrl.diffusion.conditioning import PromptRow  # noqa: E402
from mrl.diffusion.learner import DiffusionLearner  # noqa: E402
from mrl.diffusion.pipeline import Pipeline  # noqa: E402
from mrl.diffusion.sample import draw  # noqa: E402
from mrl.diffusion.update import Policy, chosen_steps, make_update  # noqa: E402
from tests.helpers.diffusion_tools import tiny_directory  # noqa: E402

IMAGES, EPOCHS = 32, 20
LEARNING_RATES = {"flow_sde": 2e-3, "ddim": 6e-3}


def brightness_by_epoch(path: Path, kind: str, fraction: float = 1.0, *, shuffled: bool = False) -> list[float]:
    settings = (
        {"prediction_type": "sample"} if kind == "ddim" else {}
    )  # the random net generates grey, not saturated, images
    tiny_directory(path, scheduler="flow" if kind == "flow_sde" else "ddim", **settings)
    pipeline = Pipeline.load(DiffusionModelConfig(path=str(path)))
    sampler = SamplerConfig.model_validate({"kind": kind, "steps": 5, "guidance": 1.0})
    policy = Policy.of(pipeline, sampler, DiffusionLossConfig(), micro_batch=256)
    steps = policy.steps
    learner = DiffusionLearner(pipeline.net, OptimizerConfig(lr=LEARNING_RATES[kind], beta2=0.999, warmup_steps=3))
    conditioning = pipeline.conditioning.encode([PromptRow("", i % 3, {}) for i in range(IMAGES)])
    found: list[float] = []
    for epoch in range(EPOCHS):
        rewards: list[torch.Tensor] = []
        keep = rewards.append
        data = draw(
            pipeline, steps, sampler, range(IMAGES), conditioning, (1, epoch), lambda _, x, keep=keep: keep(x.clone())
        )
        scores = torch.cat(rewards).mean((1, 2, 3)).numpy()
        found.append(float(scores.mean()))
        learnt = np.random.default_rng(epoch).permutation(scores) if shuffled else scores
        places = {i: chosen_steps(steps.counted, fraction, (epoch, i)) for i in range(IMAGES)}
        make_update(policy, learner, data, torch.from_numpy(of_batch(learnt)).float(), places)
    return found


@pytest.mark.parametrize(
    ("kind", "fraction"), [("flow_sde", 1.0), pytest.param("flow_sde", 0.5, marks=pytest.mark.slow), ("ddim", 1.0)]
)
def test_brightness_is_learnt(tmp_path: Path, kind: str, fraction: float) -> None:
    before, *_, after = brightness_by_epoch(tmp_path, kind, fraction)
    assert after > before + 0.06


@pytest.mark.parametrize("kind", ["flow_sde", pytest.param("ddim", marks=pytest.mark.slow)])
def test_rewards_of_other_images_teach_nothing(tmp_path: Path, kind: str) -> None:
    before, *_, after = brightness_by_epoch(tmp_path, kind, shuffled=True)
    assert abs(after - before) < 0.05
