"""Images named by rows: none outside the rows' folder is read, and none that is no image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="mrl[diffusion] is not installed")

from PIL import Image  # noqa: E402

from mrl.cli import main  # noqa: E402
from mrl.config.sections.diffusion import DiffusionDataConfig  # noqa: E402
from mrl.data import DataError  # noqa: E402
from mrl.diffusion.prompts import PromptRows  # noqa: E402
from tests.helpers.diffusion_tools import tiny_directory  # noqa: E402


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("good.png", None),
        ("absent.png", "No such file"),
        ("cut.png", "not a readable image"),
        ("text.png", "cannot identify"),
        ("../outside.png", "outside of the directory"),
        ("huge.png", "decompression bomb"),
    ],
)
def test_a_picture_of_a_row(name: str, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    picture = Image.effect_noise((64, 64), 90)
    for file in ("good.png", "huge.png", "../outside.png"):
        picture.save(folder / file)
    (folder / "cut.png").write_bytes((folder / "good.png").read_bytes()[:2000])
    (folder / "text.png").write_text("a picture")
    if name == "huge.png":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "image": name}) + "\n")
    cfg = DiffusionDataConfig.model_validate({"train": str(folder / "rows.jsonl")})
    rows = PromptRows(cfg, 1)
    [(source, row)] = rows.of_step(0, 1)
    if why is None:
        image = rows.image(source, row, 1, (16, 8))
        assert tuple(image.shape) == (1, 16, 8) and 0 <= image.min() < image.max() <= 1
    else:
        with pytest.raises(DataError, match=why):
            rows.image(source, row, 1, (16, 8))


@pytest.mark.parametrize("trainer", ["ddpo", "diffusion_sft"])
def test_mrl_data_shows_the_rows(trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`mrl data` shows the rows and names the unusable one; `mrl eval` says that it is not for diffusion models."""
    Image.effect_noise((20, 10), 90).save(tmp_path / "a.png")
    rows = [{"prompt": "a cat", "label": i % 2, "image": "a.png"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {
        "ddpo": "batch: {prompts_per_step: 2}\nreward: {function: brightness}\nsampler: {guidance: 1}",
        "diffusion_sft": "batch: {images_per_step: 2}",
    }
    config = tmp_path / "config.yaml"
    config.write_text(
        f"trainer: {trainer}\nrun: {{name: run, root: {tmp_path}, steps: 1}}\n"
        f"model: {{path: {tiny_directory(tmp_path / 'model')}}}\n"
        f"data: {{train: {tmp_path / 'rows.jsonl'}}}\n{own[trainer]}\n"
    )
    assert main(["data", str(config), "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "4, 1 different prompts" in shown and "2 (0: 2, 1: 2)" in shown and "'a cat', class" in shown
    assert ("a.png: 20 x 10" in shown) == (trainer == "diffusion_sft")
    for command in (["eval", str(config)], ["eval", str(config), "--precision-report"]):
        assert main(command) == 2
        assert f"mrl eval supports language models only, and this is trainer {trainer}" in capsys.readouterr().err
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"label": "two"}\n')
    assert main(["data", str(config)]) == 1
    assert "rows.jsonl:5: 'label' (data.label_key) must be a number, got 'two'" in capsys.readouterr().err
