"""Configurations of diffusion models that are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from mrl.config.loader import ConfigError, load
from mrl.diffusion.sft import noised
from tests.helpers.ddpo_config import settings, written
from tests.helpers.diffusion_pipelines import tiny_pipeline
from tests.system.diffusion.test_diffusion_runs import diffusers


def test_what_a_net_is_to_say_is_what_makes_the_image_again() -> None:
    x, noise, places = torch.rand(2, 1, 4, 4), torch.randn(2, 1, 4, 4), torch.tensor([10, 700])
    for kind in ("epsilon", "v_prediction", "sample"):
        scheduler = diffusers.DDIMScheduler(prediction_type=kind, clip_sample=False)
        scheduler.set_timesteps(1000)
        noisy, times, target = noised(scheduler, x, noise, places)
        for i in range(2):
            found = scheduler.step(target[i : i + 1], int(times[i]), noisy[i : i + 1]).pred_original_sample
            assert torch.allclose(found, x[i : i + 1], atol=1e-4)
    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    noisy, times, target = noised(flow, x, noise, places)
    assert torch.allclose(noisy - (times / 1000).view(-1, 1, 1, 1) * target, x, atol=1e-5)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sampler.eta=0", "sampler.eta: must be above 0: at 0 every step is deterministic"),
        ("sampler.noise_level=0.5", "sampler.noise_level: has no effect: ddim uses eta"),
        ("sampler.kind=flow_sde", "a DDIMScheduler has no flow_sde step"),
        ("sampler.steps=2000", "the scheduler's 1000 timesteps"),
        ("advantage.min_count=5", "5 exceeds the 4 scores that are kept per prompt"),
        ("advantage.against=group", "advantage.buffer_size: has no effect: scores are compared with group"),
        ("batch.images_per_update=4", "4 do not divide the 6 images of a step"),
        ("run.nproc=4 actor.sharded=true", "4 ranks do not divide the 6 images of a step, as sharded"),
        ("run.nproc=8", "6 images are fewer than the 8 ranks"),
        ("actor.optimizer.decay=linear", "required by linear decay"),
        ("actor.optimizer.muon={}", "trainer ddpo trains with Adam alone: remove muon"),
        ("sampler.negative_prompt=ugly", "a DiTTransformer2DModel takes classes"),
        ("model.path=nowhere", "nowhere is not a diffusers directory"),
        ("data.train=nowhere.jsonl", "nowhere.jsonl"),
        ("rollout.engine=sglang", "it is a key of trainer rl, and this is trainer ddpo"),
        ("reward.function=null", "give exactly one of them"),
        ("reward.server.url=http://127.0.0.1:9", "give exactly one of them"),
        (
            "reward.function=null reward.server.url=127.0.0.1:9",
            "'127.0.0.1:9' is not an address such as http://host:8000",
        ),
        ("reward.function=scorer", "`function: scorer` and `scorer:` need each other"),
        ("reward.function=scorer reward.scorer.path=nowhere", "nowhere has no config.json"),
        ("model.image_size=16", "generates images of one size only: 8"),
        ("data.image_key=picture", "data.image_key: has no effect: ddpo trains on images that it samples"),
        ("data.train=[]", "has no sources: name at least one"),
        ("data.prompt_key=text data.label_key=class", "neither 'text' nor 'class' (data.label_key): the first row of"),
        ("resilience.timeouts_s.sync=60.0 run.launcher=ft", "trainer ddpo scores during the rollout"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, override: str, said: str) -> None:
    config = written(tmp_path, settings(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(config, override.split())


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ("{path: FILE, weight: 2.0}", "prompts.jsonl has no effect: it is the only source"),
        ("{path: FILE, name: cats}", "has no effect: ddpo knows no data sources"),
        ("[FILE, FILE]", "names a source twice"),
        ("[{path: FILE, weight: 2.0}, OTHER]", "other.jsonl without weight: give a weight to every source or to none"),
    ],
)
def test_sources_are_checked_like_those_of_language_models(tmp_path: Path, sources: str, said: str) -> None:
    config, file, other = written(tmp_path, settings(tmp_path)), tmp_path / "prompts.jsonl", tmp_path / "other.jsonl"
    other.write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(config, [f"data.train={sources.replace('FILE', str(file)).replace('OTHER', str(other))}"])


def test_images_need_a_column_and_a_net_without_classes_drops_no_prompt(tmp_path: Path) -> None:
    ddpo = settings(tmp_path)
    config = {name: ddpo[name] for name in ("run", "model", "data")} | {"trainer": "diffusion_sft"}
    config["batch"] = {"images_per_step": 2, "drop_prompt": 0.3}
    with pytest.raises(ConfigError, match=r"data.image_key \(default\): no 'image': the first row of"):
        load(written(tmp_path, config))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "image": "a.png"}\n')
    net = tmp_path / "model" / "transformer" / "config.json"
    stored = json.loads(net.read_text())
    assert load(written(tmp_path, config))
    net.write_text(
        json.dumps(stored | {"_class_name": "UNet2DModel", "block_out_channels": [8], "num_class_embeds": None})
    )
    with pytest.raises(ConfigError, match="batch.drop_prompt: has no effect: this UNet2DModel is never told a class"):
        load(written(tmp_path, config))


def test_schedulers_and_nets_without_a_policy_are_refused(tmp_path: Path) -> None:
    config = settings(tmp_path)
    scheduler = tmp_path / "model" / "scheduler" / "scheduler_config.json"
    stored = json.loads(scheduler.read_text())
    scheduler.write_text(json.dumps(stored | {"clip_sample": True}))
    with pytest.raises(ConfigError, match="clamped pixels have no gradient"):
        load(written(tmp_path, config))
    scheduler.write_text(json.dumps(stored | {"steps_offset": 0}))
    with pytest.raises(ConfigError, match="sampler.steps.*the only step is at time 0, where it is deterministic"):
        load(written(tmp_path, config), ["sampler.steps=1"])
    net = tmp_path / "model" / "transformer" / "config.json"
    net.write_text(json.dumps(json.loads(net.read_text()) | {"_class_name": "QwenImageTransformer2DModel"}))
    with pytest.raises(ConfigError, match="is a QwenImageTransformer2DModel; mrl trains DiTTransformer2DModel"):
        load(written(tmp_path, config))


def test_nets_and_decoders_that_do_not_draw_an_image_of_a_prompt_alone_are_refused(tmp_path: Path) -> None:
    tiny_pipeline("sd", tmp_path / "sd")
    config = settings(tmp_path)
    config["model"]["path"] = str(tmp_path / "sd")
    net, decoder = (tmp_path / "sd" / part / "config.json" for part in ("unet", "vae"))
    stored = net.read_text()
    net.write_text(json.dumps(json.loads(stored) | {"in_channels": 9}))
    with pytest.raises(ConfigError, match="in_channels: its input has 9 channels, a latent has 4"):
        load(written(tmp_path, config))
    net.write_text(stored)
    decoder.write_text(json.dumps(json.loads(decoder.read_text()) | {"_class_name": "AutoencoderTiny"}))
    with pytest.raises(ConfigError, match="vae is a AutoencoderTiny; mrl decodes by an AutoencoderKL"):
        load(written(tmp_path, config))
