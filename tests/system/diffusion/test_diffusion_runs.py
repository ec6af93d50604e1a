"""`mrl train` with diffusion models: refusals, scores, exports, and resuming after a kill."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

diffusers = pytest.importorskip("diffusers", reason="pip install 'mrl[diffusion]'")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from mrl.config.sections.diffusion import DiffusionModelConfig, SamplerConfig  # noqa: E402
from mrl.diffusion.conditioning import PromptRow  # noqa: E402
from mrl.diffusion.pipeline import Pipeline  # noqa: E402
from mrl.diffusion.sample import draw  # noqa: E402
from mrl.diffusion.steps import STEPS  # noqa: E402
from mrl.observe import write_report  # noqa: E402
from mrl.ports import free_port  # noqa: E402
from tests.helpers import zygote  # noqa: E402
from tests.helpers.ddpo_config import settings, written  # noqa: E402
from tests.helpers.diffusion_tools import SIZE  # noqa: E402

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]

REWARD = """
import os, signal
from pathlib import Path

CALLS, KILLED = Path(__file__).with_name("calls"), Path(__file__).with_name("killed")


def bright(images, prompts, rows):
    with CALLS.open("a") as calls:
        calls.write("x")
    if not KILLED.exists() and CALLS.stat().st_size == 6:  # the second half of the third step
        KILLED.touch()
        os.kill(os.getppid(), signal.SIGKILL)
    return [{"score": float(image.mean()), "least": float(image.min())} for image in images]
"""


def train(config: Path, *overrides: str, launched: bool = False) -> subprocess.CompletedProcess[str]:
    """Trains as the only rank of a world, or with launched ranks (`run.nproc`)."""
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    alone = {} if launched else world | {"MASTER_PORT": str(free_port())}
    return zygote.run("mrl", "train", config, *overrides, timeout_s=300, **alone)


def rows(run_dir: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "perf/", "memory/", "checkpoint/", "unix_time")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in found]


def test_a_killed_run_goes_on_with_the_same_images(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    config = settings(tmp_path) | {"reward": {"function": f"{tmp_path / 'reward.py'}:bright"}}
    path, run_dir, whole = written(tmp_path, config), tmp_path / "runs" / "run", tmp_path / "runs" / "whole"
    assert train(path).returncode == -9
    assert len(rows(run_dir)) == 2
    done = train(path)
    assert done.returncode == 0 and "resuming from" in done.stdout, done.stdout + done.stderr
    assert train(path, "run.name=whole").returncode == 0
    assert rows(run_dir) == rows(whole), "to the last bit, with the statistics of prompts"
    assert all("reward/least" in row and row["actor/skipped"] == 0 for row in rows(run_dir))
    for step in (0, 1, 3, 4):
        name = f"images/step_{step}.png"
        assert (run_dir / name).read_bytes() == (whole / name).read_bytes()
    assert (run_dir / "images" / "step_0.png").read_bytes() != (run_dir / "images" / "step_4.png").read_bytes()
    assert {"reward_by_prompt/low", "reward_by_prompt/high"} <= rows(run_dir)[0].keys()
    page = write_report(run_dir).read_text()
    assert "data:image/png;base64" in page and "DDPO" in page and "Reward by prompt" in page
    card = (run_dir / "hf" / "README.md").read_text()
    assert "library_name: diffusers" in card and "images of the last grid" in card and "reward.py:bright" in card
    assert (run_dir / "hf" / "reward.png").read_bytes()[:4] == b"\x89PNG" and "| prompt | first | last |" in card
    assert_diffusers_draws_the_same(run_dir / "hf")


def assert_diffusers_draws_the_same(export: Path) -> None:
    """Checks that diffusers' own scheduler steps generate the same image from the noise of mrl's samples."""
    pipeline = Pipeline.load(DiffusionModelConfig(path=str(export)))
    steps = STEPS["ddim"](pipeline.scheduler, 4, 1.0)
    told = pipeline.conditioning.encode([PromptRow("mid", 1, {})])
    sampler = SamplerConfig(steps=4, guidance=1.0)
    ours = draw(pipeline, steps, sampler, range(1), told, (1, 0), lambda ids, images: None).latents[0]
    net = diffusers.DiTTransformer2DModel.from_pretrained(export / "transformer", low_cpu_mem_usage=False).eval()
    scheduler = diffusers.DDIMScheduler.from_pretrained(export / "scheduler")
    scheduler.set_timesteps(4)
    for place, time in enumerate(scheduler.timesteps):
        x = ours[place][None]
        with torch.no_grad():
            said = net(x, timestep=time[None], **told).sample
        noise = (ours[place + 1] - steps.mean(said, x, torch.tensor([place]))[0]) / steps.stds[place]
        theirs = scheduler.step(said, time, x, eta=1.0, variance_noise=noise[None]).prev_sample[0]
        assert torch.allclose(theirs, ours[place + 1], atol=1e-3)
        assert noise.abs().max() < 6


@pytest.mark.slow
def test_adapters_do_not_go_on_beside_other_weights(tmp_path: Path) -> None:
    config = settings(tmp_path)
    config["actor"]["lora"] = {"rank": 2}
    path = written(tmp_path, config)
    assert train(path, "run.steps=1", "checkpoint.export_hf=false").returncode == 0
    weights = tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    stored = load_file(weights)
    stored[min(stored)] += 1
    save_file(stored, weights)
    done = train(path, "run.steps=2")
    changed = f'model.path: "{tmp_path / "model"}" -> "edited: transformer/diffusion_pytorch_model.safetensors"'
    assert done.returncode != 0 and changed in done.stderr
    done = train(path, "run.steps=2", "checkpoint.accept_changes=[model.path]")
    assert done.returncode != 0 and "adapters were trained on other weights than those of model.path" in done.stderr


@pytest.mark.slow
def test_an_export_without_room_does_not_end_a_run_that_is_to_go_on(tmp_path: Path) -> None:
    """The run goes on if an intermediate export fails, here because a file is in its place."""
    run_dir = tmp_path / "runs" / "run"
    run_dir.mkdir(parents=True)
    (run_dir / "hf_step_1").touch()
    done = train(
        written(tmp_path, settings(tmp_path)),
        *("run.steps=2", "checkpoint.weights_every_steps=1", "checkpoint.on_error=warn", "checkpoint.export_hf=false"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["checkpoint/failed"] == 1 and (run_dir / "hf_step_2" / "transformer").is_dir()


@pytest.mark.parametrize(
    ("bad", "what"),
    [pytest.param(0, "generating the images after step 0", marks=pytest.mark.slow), (2, "sampling for step 1")],
)
def test_a_row_of_one_rank_that_the_net_does_not_know_is_named(tmp_path: Path, bad: int, what: str) -> None:
    """An unknown class in one rank's row is named at once; of two ranks that share the net none waits."""
    config = settings(tmp_path)
    config["data"]["shuffle"] = False
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines()
    lines[bad] = json.dumps({"prompt": "odd", "label": 1000})
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    ranks = ("run.nproc=2", "run.timeout_s=60", "actor.sharded=true", "images.count=2")
    done = train(written(tmp_path, config), *ranks, launched=True)
    said = f"{what} failed: rank {bad // 2}: ValueError: prompt 'odd': class 1000 is not in 0 to 2"
    assert done.returncode != 0 and said in done.stderr


def test_denoising_learns_from_pictures(tmp_path: Path) -> None:
    for name, level in (("low", 20), ("mid", 120), ("high", 230)):
        Image.fromarray(np.full((SIZE, SIZE), level, np.uint8)).save(tmp_path / f"{name}.png")
    lines = [{"prompt": name, "label": i, "image": f"{name}.png"} for i, name in enumerate(("low", "mid", "high"))]
    (tmp_path / "pictures.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = settings(tmp_path)
    config = {key: config[key] for key in ("run", "model", "actor")} | {
        "trainer": "diffusion_sft",
        "data": {"train": str(tmp_path / "pictures.jsonl")},
        "batch": {"images_per_step": 12},
    }
    config["model"]["from_scratch"] = True
    config["actor"]["optimizer"] = {"lr": 5e-3}
    done = train(written(tmp_path, config), "run.steps=25")
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [row["actor/loss"] for row in rows(tmp_path / "runs" / "run")]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
