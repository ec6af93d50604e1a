"""PPO on rows with images and a trained tower: resuming after a kill reproduces the uninterrupted run, samples of
earlier steps keep their images, and no file of the run contains image data."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForImageTextToText

from tests.helpers.runs import Runs, assert_the_same, results, samples, train
from tests.helpers.tiny_vl import make_tiny_vl
from tests.helpers.vision_rows import vision_settings, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.longest]

PICTURES = 6  # images in the six rows
INLINE = (0, 2)  # rows with inline images
TRAIN = {"optimizer": {"lr": 0.005, "warmup_steps": 4}, "max_tokens_per_microbatch": 150}
PPO = {
    "actor": {"parallel": {"tensor": 2}, **TRAIN},
    "critic": {"parallel": {"pipeline": 2}, **TRAIN},
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "samples_per_minibatch": 4},
    "algorithm": {"adv_estimator": "gae", "kl": {"use_in_loss": True, "coef": 0.01}},
    "replay": {"buffer_prompts": 6, "prompts_per_step": 2},
    "checkpoint": {"every_steps": 2, "export_hf": True},
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    root = tmp_path_factory.mktemp("vision_resume")
    return root, write_rows(root, INLINE)


@pytest.fixture(scope="module")
def ppo(stored: tuple[Path, list[bytes]]) -> Runs:
    """Runs actor TP2 and critic PP2, which train their towers. A step uses four of six rows, and replay."""
    root, _ = stored
    model = make_tiny_vl(root / "model", "qwen3_vl")
    config = vision_settings(root, model, "run", {}, **PPO)
    config["run"] |= {"trackers": [], "seed": 3}
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    return Runs(root, root / "config.yaml")


def test_ppo_with_pictures_killed_and_started_again_is_the_same_run(ppo: Runs) -> None:
    rows = results(ppo.whole)
    assert all(rows[step]["critic/loss"] > 0 and rows[step]["actor/grad_norm"] > 0 for step in range(1, 5))
    assert_the_same(ppo)


def test_samples_of_earlier_steps_are_learnt_from_with_their_pictures(ppo: Runs) -> None:
    rows = results(ppo.whole)
    assert [rows[step]["replay/samples"] for step in range(1, 5)] == [0, 4, 4, 4]
    assert all(rows[step]["mismatch/max_abs"] < 1e-4 for step in range(1, 5))


def test_what_is_exported_is_transformers_model_with_a_tower_that_has_moved(ppo: Runs) -> None:
    before, after = (
        AutoModelForImageTextToText.from_pretrained(path) for path in (ppo.folder / "model", ppo.whole / "hf")
    )
    moved = {name for name, tensor in after.state_dict().items() if not tensor.equal(before.state_dict()[name])}
    assert {"model.visual.patch_embed.proj.weight", "model.visual.blocks.0.attn.qkv.weight"} <= moved


def test_nothing_that_is_written_down_holds_a_picture(ppo: Runs, stored: tuple[Path, list[bytes]]) -> None:
    """Samples, metrics and logs of ranks and engines contain no image data, of image files or inline images."""
    root, pictures = stored
    assert len(pictures) == PICTURES
    told = [file for file in ppo.killed.rglob("*") if file.is_file() and not {"checkpoints", "hf"} & {*file.parts}]
    told += root.glob("terminal_*")
    assert any("rollouts" in file.parts for file in told) and any(file.suffix == ".log" for file in told), told
    data = b"".join(file.read_bytes() for file in told)
    for picture in pictures:
        middle = picture[40:64], base64.b64encode(picture[39:66])
        assert not any(part in data for part in middle)
    assert b"image/png;base64" not in data
    said = [row["row"]["images"] for each in samples(ppo.killed).values() for row in each]
    assert [{"image": 0}] in said and ["3_0.png"] in said and [] in said
    assert max(file.stat().st_size for file in (ppo.killed / "rollouts").iterdir()) < 20_000


def test_a_picture_that_is_gone_ends_the_next_start_with_its_row(ppo: Runs) -> None:
    file = ppo.folder / "3_0.png"
    before = file.read_bytes()
    try:
        file.unlink()
        with pytest.raises(AssertionError, match=r"rows.jsonl:4: image 0: '3_0.png' is not a file below"):
            train(ppo.folder, ppo.config, "run.name=killed", "run.steps=5")
    finally:
        file.write_bytes(before)
