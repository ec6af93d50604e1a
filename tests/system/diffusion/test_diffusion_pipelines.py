"""Images of every kind of pipeline equal diffusers' own from the same noise; adapters and exports of each kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

diffusers = pytest.importorskip("diffusers", reason="pip install 'mrl[diffusion]'")

from mrl.config.sections.diffusion import (  # noqa: E402
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionTrainConfig,
    SamplerConfig,
)
from mrl.config.sections.models import OptimizerConfig  # noqa: E402
from mrl.diffusion import nets  # noqa: E402
from mrl.diffusion.conditioning import PromptRow  # noqa: E402
from mrl.diffusion.learner import DiffusionLearner  # noqa: E402
from mrl.diffusion.pipeline import Pipeline  # noqa: E402
from mrl.diffusion.sample import Trajectories, draw  # noqa: E402
from mrl.diffusion.update import Policy, make_update  # noqa: E402
from tests.helpers.diffusion_pipelines import KINDS, SIDE, tiny_pipeline  # noqa: E402

STEPS, NEGATIVE = 4, "ugly"
PROMPTS = [PromptRow("a cat", 3, {}), PromptRow("dog", 7, {})]
PIXELS = 2 * SIDE


def policy_of(kind: str, path: Path, level: float, **settings: Any) -> Policy:
    """Returns a policy. level: eta or noise level; at (nearly) 0 it generates what diffusers' pipelines generate"""
    negative = NEGATIVE if kind in ("sd", "sd3") else ""
    train = DiffusionTrainConfig.model_validate(settings)
    model = DiffusionModelConfig(path=str(path), image_size=PIXELS)
    pipeline = Pipeline.load(model, train, negative)
    how = {"eta": level} if kind in ("sd", "dit") else {"kind": "flow_sde", "noise_level": max(level, 1e-6)}
    sampler = SamplerConfig.model_validate({"steps": STEPS, "guidance": 3.0, **how})
    return Policy.of(pipeline, sampler, DiffusionLossConfig(), micro_batch=3)


def drawn(policy: Policy) -> tuple[Trajectories, Tensor]:
    images: list[Tensor] = []
    conditioning = policy.pipeline.conditioning.encode(PROMPTS)
    found = draw(
        policy.pipeline, policy.steps, policy.sampler, range(2), conditioning, (1, 0), lambda _, x: images.append(x)
    )
    return found, torch.cat(images)


def theirs(kind: str, pipeline: Any, noise: Tensor) -> Tensor:
    """Returns diffusers' images from this noise, [n, 3, H, W] in 0..1."""
    texts = [prompt.text for prompt in PROMPTS]
    if kind == "dit":  # this pipeline accepts no noise
        generator = torch.Generator().manual_seed(0)
        import diffusers.pipelines.dit.pipeline_dit as module

        module.randn_tensor, kept = lambda *shape, **settings: noise, module.randn_tensor
        try:
            images = pipeline(
                [prompt.label for prompt in PROMPTS], 3.0, generator, num_inference_steps=STEPS, output_type="np"
            ).images
        finally:
            module.randn_tensor = kept
        return torch.from_numpy(images).permute(0, 3, 1, 2)
    given: dict[str, Any] = {"num_inference_steps": STEPS, "guidance_scale": 3.0, "output_type": "pt"}
    given |= {"height": PIXELS, "width": PIXELS}
    if kind == "flux":
        noise = pipeline._pack_latents(noise, 2, 4, SIDE, SIDE)
    else:
        given["negative_prompt"] = [NEGATIVE] * 2
    return pipeline(texts, latents=noise, **given).images


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_images_are_those_of_diffusers(kind: str, tmp_path: Path) -> None:
    """Text encoding, guidance, schedule and decoding equal diffusers': without noise the images are the same."""
    pipeline = tiny_pipeline(kind, tmp_path)
    policy = policy_of(kind, tmp_path, 0.0)
    data, images = drawn(policy)
    expected = theirs(kind, pipeline, data.latents[:, 0])
    assert images.shape == expected.shape == (2, 3, PIXELS, PIXELS) and images.std() > 0.01
    assert (images - expected).abs().max() < 0.6 / 255 + 1e-3
    assert not torch.allclose(images[0], images[1], atol=0.05)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "sd3")) for kind in KINDS])
def test_adapters_are_trained_and_load_in_diffusers(kind: str, tmp_path: Path) -> None:
    """Before the first update the ratio is 1. After three updates the exported adapters generate the trained net's
    images in diffusers."""
    tiny_pipeline(kind, tmp_path / "base")
    policy = policy_of(kind, tmp_path / "base", 1.0, lora={"rank": 2, "alpha": 6.0}, recompute=True)
    data, _ = drawn(policy)
    places = dict.fromkeys(range(2), policy.steps.counted)
    learner = DiffusionLearner(policy.pipeline.net, OptimizerConfig(lr=0.05))
    assert sum(parameter.numel() for parameter in learner.parameters) < 3000
    metrics = [make_update(policy, learner, data, torch.tensor([1.0, -1.0]), places) for _ in range(3)]
    assert metrics[0]["approx_kl"] < 1e-8 and metrics[0]["clipfrac"] == 0 and metrics[0]["grad_norm"] > 0
    assert metrics[2]["approx_kl"] > 1e-8
    quiet = policy_of(kind, tmp_path / "base", 0.0)
    _, before = drawn(quiet)
    quiet.pipeline.net = policy.pipeline.net
    data, images = drawn(quiet)
    assert not torch.allclose(before, images, atol=0.01)
    (tmp_path / "whole").mkdir(), (tmp_path / "adapter").mkdir()
    policy.pipeline.save(nets.weights(policy.pipeline.net), tmp_path / "whole")
    policy.pipeline.save_adapter(nets.weights(policy.pipeline.net), tmp_path / "adapter")
    loaded = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "whole", safety_checker=None)
    loaded.set_progress_bar_config(disable=True)
    assert (images - theirs(kind, loaded, data.latents[:, 0])).abs().max() < 0.02
    if kind != "dit":  # its pipeline does not load adapters
        base = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "base", safety_checker=None)
        base.set_progress_bar_config(disable=True)
        base.load_lora_weights(tmp_path / "adapter")
        assert (images - theirs(kind, base, data.latents[:, 0])).abs().max() < 0.02


def test_a_pndm_scheduler_gives_the_times_of_ddim(tmp_path: Path) -> None:
    """A PNDM scheduler gives DDIM's timesteps. PNDM itself repeats one timestep for its method; the export keeps the
    PNDM configuration."""
    tiny_pipeline("sd", tmp_path / "base")
    folder = tmp_path / "base" / "scheduler"
    ddim = diffusers.DDIMScheduler.from_pretrained(folder)
    diffusers.PNDMScheduler.from_config(ddim.config, skip_prk_steps=True).save_pretrained(folder)
    policy = policy_of("sd", tmp_path / "base", 1.0)
    ddim.set_timesteps(STEPS)
    assert policy.steps.times.tolist() == ddim.timesteps.tolist() and len(policy.steps.counted) == STEPS
    (tmp_path / "whole").mkdir()
    policy.pipeline.save(nets.weights(policy.pipeline.net), tmp_path / "whole")
    assert "PNDMScheduler" in (tmp_path / "whole" / "scheduler" / "scheduler_config.json").read_text()


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_a_directory_that_lacks_weights_is_refused_by_their_names(part: str, tmp_path: Path) -> None:
    """Missing weights are refused by name. The libraries would use uninitialized memory or random values for them."""
    tiny_pipeline("sd", tmp_path)
    [file] = (tmp_path / part).glob("*.safetensors")
    stored = load_file(file)
    lacking = min(stored)
    del stored[lacking]
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{part} lacks 1 weights of a .*: {re.escape(lacking)}"):
        Pipeline.load(DiffusionModelConfig(path=str(tmp_path)))
