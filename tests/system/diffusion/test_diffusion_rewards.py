"""Rewards of images by functions, an image-text model and a server, computed while the next images are generated."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers", reason="pip install 'mrl[diffusion]'")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from mrl.config.sections.diffusion import ImageRewardConfig  # noqa: E402
from mrl.diffusion.conditioning import PromptRow  # noqa: E402
from mrl.diffusion.rewards import ImageRewards  # noqa: E402
from mrl.reward.errors import RewardError  # noqa: E402
from tests.helpers.diffusion_pipelines import tiny_scorer  # noqa: E402


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [0.0]", "returned 1 scores for 2 samples"),
        ("return [0.5, float('nan')]", "step 1, sample 4 (prompt 'b')"),
        ("raise ValueError('dark')", "dark"),
        ("return [{'score': 0.5, 'std': 0.1}] * 2", "a part named 'std' would hide the metric of that name"),
    ],
)
def test_a_reward_that_fails_is_named_with_its_sample(tmp_path: Path, body: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(f"def score(images, prompts, rows):\n    {body}\n")
    rewards = ImageRewards(ImageRewardConfig(function=f"{tmp_path / 'mine.py'}:score"))
    try:
        rewards.submit(range(3, 5), torch.rand(2, 3, 4, 4), [PromptRow("a", None, {}), PromptRow("b", None, {})], 0)
        with pytest.raises(RewardError, match=re.escape(said)):
            rewards.collect()
    finally:
        rewards.close()


def test_the_built_in_rewards() -> None:
    from mrl.reward.images import BUILTINS

    flat, noise = np.full((1, 3, 32, 32), 0.25, np.float32), np.random.default_rng(1).random((1, 3, 32, 32), np.float32)
    images = np.concatenate([flat, noise])
    assert BUILTINS["brightness"](images, [], [])[0] == pytest.approx(0.25)
    small, large = BUILTINS["jpeg_incompressibility"](images, [], [])
    assert small < large and BUILTINS["jpeg_compressibility"](images, [], []) == [-small, -large]
    with pytest.raises(RewardError, match="did you mean 'brightness'"):
        ImageRewards(ImageRewardConfig(function="brightnes"))


IMAGES = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
PROMPTS = [PromptRow("a cat", None, {"prompt": "a cat", "size": 3}), PromptRow("dog", 1, {}), PromptRow("a", 2, {})]


def scored(config: dict[str, Any]) -> list[Any]:
    rewards = ImageRewards(ImageRewardConfig.model_validate(config))
    try:
        rewards.submit(range(2), IMAGES[:2], PROMPTS[:2], 0)
        rewards.submit(range(2, 3), IMAGES[2:], PROMPTS[2:], 0)
        return rewards.collect()
    finally:
        rewards.close()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Answers with the brightness and width of each image, and the length of its prompt."""
        samples = json.loads(self.rfile.read(int(self.headers["content-length"])))["samples"]
        scores = []
        for sample in samples:
            picture = Image.open(io.BytesIO(base64.b64decode(sample["image"])))
            assert picture.format == "PNG" and sample.keys() == {"prompt", "image", "row"}
            scores.append(
                {"score": float(np.asarray(picture).mean()), "width": picture.width, "words": len(sample["prompt"])}
            )
        body = json.dumps({"scores": scores}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}/score"
        found.shutdown()


def test_a_server_gets_pictures_as_png(server: str) -> None:
    """A server receives images as PNG with every byte's exact value."""
    found = scored({"server": {"url": server, "batch_size": 2}})
    exact = (IMAGES * 255).round().mean((1, 2, 3))
    assert [outcome.score for outcome in found] == pytest.approx(exact.tolist(), rel=1e-6)
    assert [outcome.parts["words"] for outcome in found] == [5, 3, 1] and found[0].parts["width"] == 16


def test_a_server_that_is_not_there_is_named_with_the_sample() -> None:
    with pytest.raises(RewardError, match="step 1, sample 0 .prompt 'a cat'"):
        scored({"server": {"url": "http://127.0.0.1:9/score", "retries": 0, "timeout_s": 5}})


def test_the_scorer_says_how_an_image_goes_with_its_prompt(tmp_path: Path) -> None:
    """The scorer gives the model's own score with inputs from its own processor."""
    model, processor = tiny_scorer(tmp_path)
    found = scored({"function": "scorer", "scorer": {"path": str(tmp_path)}})
    levels = (IMAGES * 255).round().byte().permute(0, 2, 3, 1).numpy()
    given = processor(
        text=[prompt.text for prompt in PROMPTS],
        images=[Image.fromarray(each) for each in levels],
        return_tensors="pt",
        padding="max_length",
    )
    with torch.no_grad():
        exact = model(**given).logits_per_image.diag() / model.logit_scale.exp()
    assert [outcome.score for outcome in found] == pytest.approx(exact.tolist(), abs=1e-5)
    assert exact.std() > 0.01


def test_a_scorer_that_is_none_is_refused_when_the_run_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RewardError, match="reward.scorer.path: .* cannot be loaded by transformers"):
        ImageRewards(ImageRewardConfig.model_validate({"function": "scorer", "scorer": {"path": str(tmp_path)}}))


@pytest.mark.slow
def test_a_scorer_that_lacks_weights_is_refused_by_their_names(tmp_path: Path) -> None:
    tiny_scorer(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["visual_projection.weight"]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RewardError, match="lacks 1 weights of a CLIPModel: visual_projection.weight"):
        ImageRewards(ImageRewardConfig.model_validate({"function": "scorer", "scorer": {"path": str(tmp_path)}}))


def test_scores_are_made_while_the_next_images_are_drawn(tmp_path: Path) -> None:
    """The first scoring call ends before the second images exist."""
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n\n\n"
        "def score(images, prompts, rows):\n"
        "    (Path(__file__).parent / prompts[0]).touch()\n"
        "    return images.mean((1, 2, 3)).tolist()\n"
    )
    rewards = ImageRewards(ImageRewardConfig(function=f"{tmp_path / 'mine.py'}:score"))
    try:
        rewards.submit(range(2), IMAGES[:2], PROMPTS[:2], 0)
        end = time.monotonic() + 60
        while not (tmp_path / "a cat").exists():
            assert time.monotonic() < end, "nothing is scored before all is drawn"
            time.sleep(0.01)
        rewards.submit(range(2, 3), IMAGES[2:], PROMPTS[2:], 0)
        assert len(rewards.collect()) == 3
    finally:
        rewards.close()
