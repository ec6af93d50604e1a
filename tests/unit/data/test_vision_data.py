"""Rows with images: how they are read, and which are refused, each with file, row and reason."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from mrl.config.schema import DataConfig
from mrl.core import Prompt, Request, Sample
from mrl.data import DataError, PromptDataset, collate, load_image_processor, load_tokenizer
from mrl.data.image_positions import image_positions
from mrl.data.image_store import ImageStore
from mrl.data.images import SizeBounds, read_image
from mrl.inference.errors import BadAnswer
from mrl.inference.samples import Expected, generate_body, read_answer
from tests.helpers.tiny_vl import IMAGE, make_tiny_vl

RNG = np.random.default_rng(0)
PATCH = 4


def picture(width: int = 24, height: int = 16, mode: str = "RGB") -> Image.Image:
    channels = {"RGB": 3, "RGBA": 4}[mode]
    return Image.fromarray(RNG.integers(0, 256, (height, width, channels)).astype("uint8"), mode)


def stored(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vl(tmp_path_factory.mktemp("vl") / "model", "qwen3_vl", weights=False, patch=PATCH)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    picture().save(tmp_path / "data/a.png")
    (tmp_path / "secret.png").write_bytes(stored(picture()))
    os.symlink(tmp_path / "secret.png", tmp_path / "data/link.png")
    return tmp_path / "data"


def dataset(folder: Path, model: Path, *rows: dict[str, Any], **keys: Any) -> PromptDataset:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "what?", "answer": "3", **row}) + "\n" for row in rows))
    cfg = DataConfig(**{"train": str(file), "chat_template": True, "shuffle": False, **keys})
    return PromptDataset(cfg.train, cfg, load_tokenizer(model), image_processor=load_image_processor(model, cfg))


def test_pictures_stand_where_the_prompt_says_and_take_a_token_for_each_feature(folder: Path, model: Path) -> None:
    rows = [
        {"prompt": "see <image> and <image>.", "images": ["a.png", url(stored(picture(8, 40)))]},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "no place"}], "images": "a.png"},
        {"prompt": "none"},
    ]
    two, first, none = dataset(folder, model, *rows).prompts_for_step(0, 3, 1)
    spot = "<|vision_start|><|image_pad|><|vision_end|>"
    assert two.text == f"user: see {spot} and {spot}.assistant:"
    assert first.text == f"system: suser: {spot}no placeassistant:"
    assert two.images is not None and [shape[:2] for shape in two.images] == [(4, 6), (10, 2)]
    assert (
        two.token_ids.count(IMAGE) == 6 + 5
        and two.unexpanded_token_ids is not None
        and two.unexpanded_token_ids.count(IMAGE) == 2
    )
    assert none.images == () and none.pictures == () and none.unexpanded_token_ids == none.token_ids
    assert two.row["images"] == ["a.png", {"image": 1}], "pixels do not go to rewards and logs"
    assert "PNG" not in repr(two)


def test_pictures_inside_a_value_of_the_row_are_seen_and_their_pixels_stay_there(folder: Path, model: Path) -> None:
    row = {"prompt": "<image> how many?", "extra": {"images": [url(stored(picture()))], "id": 7}}
    (prompt,) = dataset(folder, model, row, images_key="extra.images").prompts_for_step(0, 1, 1)
    assert prompt.token_ids.count(IMAGE) == 6
    assert prompt.row["extra"] == {"images": [{"image": 0}], "id": 7}


def test_without_a_chat_template_a_place_needs_its_picture(folder: Path, model: Path) -> None:
    with pytest.raises(DataError, match="1 image placeholders .* the row 0 images"):
        dataset(folder, model, {"prompt": "<image> how many?"}, chat_template=False)


def test_pictures_of_parquet_stay_undecoded_until_they_are_sampled_for(folder: Path, model: Path) -> None:
    features = datasets.Features({"problem": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    made = {"problem": ["<image>how many?"] * 3, "images": [[picture()], [picture(40, 40)], [picture()]]}
    datasets.Dataset.from_dict(made, features=features).to_parquet(folder / "geo.parquet")
    cfg = DataConfig(train=str(folder / "geo.parquet"), prompt_key="problem", chat_template=True, shuffle=False)
    data = PromptDataset(cfg.train, cfg, load_tokenizer(model), image_processor=load_image_processor(model, cfg))
    prompts = data.prompts_for_step(0, 3, 1)
    assert [prompt.token_ids.count(IMAGE) for prompt in prompts] == [6, 25, 6]
    assert prompts[0].row["images"] == [{"image": 0}]


def test_the_trainer_decodes_what_the_engine_was_sent(folder: Path, model: Path) -> None:
    rows = [{"images": [url(stored(picture(31, 17)))]}, {"images": ["a.png"]}, {}]
    data = dataset(folder, model, *rows)
    image_processor = load_image_processor(model, data.cfg)
    assert image_processor is not None
    prompts = data.prompts_for_step(0, 3, 1)
    samples = [Sample(Request(i, i, prompt, 1), [7], [-1.0], "stop", "0") for i, prompt in enumerate(prompts)]
    places = image_positions(collate(0, samples), image_processor.vision)
    store = ImageStore(data.cfg.train, image_processor)
    sent = [image_processor.pixels(Image.open(io.BytesIO(png))) for prompt in prompts for png in prompt.pictures]
    assert torch.equal(store(places.images), torch.cat(sent))
    picture().save(folder / "a.png")
    with pytest.raises(DataError, match="rows.jsonl:2: image 0 decodes differently here than on rank 0"):
        ImageStore(data.cfg.train, image_processor)(places.images)


def test_a_picture_that_is_kept_is_the_one_that_was_sampled_for(folder: Path, model: Path) -> None:
    data = dataset(folder, model, {"images": ["a.png"]})
    image_processor = load_image_processor(model, data.cfg)
    assert image_processor is not None
    store = ImageStore(data.cfg.train, image_processor)

    def images(prompt: Prompt) -> torch.Tensor:
        samples = [Sample(Request(0, 0, prompt, 1), [7], [-1.0], "stop", "0")]
        return image_positions(collate(0, samples), image_processor.vision).images

    [before] = data.prompts_for_step(0, 1, 1)
    store(images(before))
    picture().save(folder / "a.png")
    [after] = data.prompts_for_step(0, 1, 1)
    assert torch.equal(store(images(after)), image_processor.pixels(Image.open(io.BytesIO(after.pictures[0]))))
    picture().save(folder / "a.png")
    [unread] = data.prompts_for_step(0, 1, 1)
    picture().save(folder / "a.png")
    with pytest.raises(DataError, match="rows.jsonl:1: image 0 decodes differently here than on rank 0"):
        store(images(unread))


def test_a_request_has_one_token_a_picture_and_an_answer_must_have_counted_all(folder: Path, model: Path) -> None:
    prompts = dataset(folder, model, {"images": ["a.png"]}, {}).prompts_for_step(0, 2, 1)
    requests = [Request(i, i, prompt, 1) for i, prompt in enumerate(prompts)]
    from mrl.core import SamplingParams

    bodies = [generate_body(request, SamplingParams()) for request in requests]
    assert [body["input_ids"].count(IMAGE) for body in bodies] == [1, 0]
    [url] = bodies[0]["image_data"]
    assert url.startswith("data:image/png;base64,") and "image_data" not in bodies[1]
    meta = {
        "finish_reason": {"type": "stop"}, "weight_version": "0", "output_token_logprobs": [[-1.0, 5, None]],
        "prompt_tokens": len(prompts[0].token_ids) - 1,
    }  # fmt: skip
    with pytest.raises(BadAnswer, match="sample 0: the engine made .* tokens of the prompt and its pictures"):
        read_answer(requests[0], json.dumps({"meta_info": meta, "output_ids": [5]}).encode(), Expected(320, 8))


def test_sizes_are_those_of_transformers_and_fit_at_once() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    bounds, sizes = SizeBounds(28, 784, 1003520), np.exp(RNG.uniform(0, 8, (3000, 2))).astype(int) + 1
    for width, height in sizes.tolist():
        if max(width, height) > 200 * min(width, height):
            continue
        found = bounds.fit(width, height)
        assert found == smart_resize(height, width, 28, 784, 1003520)[::-1]
        assert bounds.fit(*found) == found


def test_pictures_are_turned_upright_and_what_is_transparent_is_white(folder: Path, model: Path) -> None:
    turned = Image.new("RGB", (24, 16), (9, 9, 9))
    exif = turned.getexif()
    exif[0x0112] = 6
    data = stored(turned, "PNG", exif=exif)
    (prompt,) = dataset(folder, model, {"images": [url(data)]}).prompts_for_step(0, 1, 1)
    assert prompt.images is not None and prompt.images[0][:2] == (6, 4)
    clear = stored(Image.new("RGBA", (8, 8), (0, 0, 0, 0)))
    assert np.asarray(read_image(clear, folder, SizeBounds(8, 64, 6400))).min() == 255


def half(kind: str) -> bytes:
    data = stored(picture(200, 200), kind)
    return data[: len(data) // 2]


def bomb() -> bytes:
    return stored(Image.new("1", (20000, 20000)))


GOOD = stored(picture())
BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "outside": (lambda: {"images": ["../secret.png"]}, "image 0: '../secret.png' is outside of"),
    "absolute": (lambda: {"images": ["/etc/passwd"]}, "is outside of"),
    "link": (lambda: {"images": ["link.png"]}, "is outside of"),
    "url": (lambda: {"images": ["http://x/y.png"]}, "mrl downloads no images"),
    "file url": (lambda: {"images": ["file:///etc/passwd"]}, "mrl downloads no images"),
    "missing": (lambda: {"images": ["a.png", "none.png"]}, "image 1: 'none.png' is not a file below"),
    "folder": (lambda: {"images": ["."]}, "is not a file below"),
    "zero byte": (lambda: {"images": ["a\0.png"]}, "is not a path"),
    "number": (lambda: {"images": [3]}, "an image must be a path, bytes or a data: URL, not int"),
    "null": (lambda: {"images": [None]}, "not NoneType"),
    "nothing in it": (lambda: {"images": [{"bytes": None, "path": None}]}, "not NoneType"),
    "no base64": (lambda: {"images": ["data:image/png,abc"]}, "must be base64"),
    "bad base64": (lambda: {"images": ["data:image/png;base64,!!"]}, "not base64"),
    "cut off": (lambda: {"images": [url(GOOD[:20])]}, "not a readable image"),
    "cut behind the header": (lambda: {"images": [url(GOOD[:50])]}, "image 0: the file is truncated"),
    "last byte": (lambda: {"images": [url(GOOD[:-1])]}, "image 0: the file is truncated"),
    "half a jpeg": (lambda: {"images": [url(half("JPEG"))]}, "image 0: the file is truncated"),
    "half a webp": (lambda: {"images": [url(half("WEBP"))]}, "the file is truncated|not a readable image"),
    "text": (lambda: {"images": [url(b"<svg/>")]}, "not a readable image"),
    "empty": (lambda: {"images": [url(b"")]}, "not a readable image"),
    "tiff": (lambda: {"images": [url(stored(picture(), "TIFF"))]}, "not a readable image"),
    "bomb": (lambda: {"images": [url(bomb())]}, "Image size|at most 64000000 are decoded"),
    "strip": (lambda: {"images": [url(stored(picture(1000, 2)))]}, "aspect ratio is above 200"),
    "too many": (lambda: {"images": ["a.png"] * 9}, "9 images, more than data.max_images=8"),
    "more places": (
        lambda: {"prompt": "<image><image>", "images": ["a.png"]},
        "2 image placeholders .* the row 1 images",
    ),
    "fewer places": (
        lambda: {"prompt": "<image>", "images": ["a.png"] * 2},
        "1 image placeholders .* the row 2 images",
    ),
    "a place alone": (
        lambda: {"prompt": "<image> how many?", "image": "a.png"},
        "1 image placeholders .* the row 0 images",
    ),
    "parts that are text": (
        lambda: {"prompt": [{"role": "user", "content": ["hi"]}], "images": ["a.png"]},
        r"has the 'content' \['hi'\], which is not text",
    ),
    "places in messages": (
        lambda: {"prompt": [{"role": "user", "content": "<image> <image>"}], "images": ["a.png"]},
        "2 image placeholders",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_refused_with_its_row(folder: Path, model: Path, name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(DataError, match=f"rows.jsonl:2: .*({message})"):
        dataset(folder, model, {"images": ["a.png"]}, make())


def test_a_text_that_spells_an_image_token_is_text_in_a_conversation_and_refused_without(
    folder: Path, model: Path
) -> None:
    row = {"prompt": "say <|image_pad|>", "images": ["a.png"]}
    (prompt,) = dataset(folder, model, row).prompts_for_step(0, 1, 1)
    assert prompt.token_ids.count(IMAGE) == 6
    with pytest.raises(DataError, match="the prompt has 2 image tokens"):
        dataset(folder, model, row, chat_template=False)


def test_a_picture_that_is_damaged_inside_is_found_when_it_is_sampled_for(folder: Path, model: Path) -> None:
    whole = stored(picture(200, 200))
    data = dataset(folder, model, {"images": [url(whole[:3000] + bytes(200) + whole[3200:])]})
    with pytest.raises(DataError, match="rows.jsonl:1: image 0: it is not a readable image"):
        data.prompts_for_step(0, 1, 1)


def test_large_pictures_are_made_smaller_and_long_prompts_left_out(folder: Path, model: Path) -> None:
    large = {"images": [url(stored(picture(400, 400)))]}
    (prompt,) = dataset(folder, model, large, max_image_tokens=20).prompts_for_step(0, 1, 1)
    assert 9 <= prompt.token_ids.count(IMAGE) <= 20
    data = dataset(folder, model, large, {"prompt": "short"}, max_prompt_tokens=40)
    assert len(data) == 1 and data.sources[0].dropped == 1


def test_a_processor_of_another_form_is_refused(model: Path, tmp_path: Path) -> None:
    other = make_tiny_vl(tmp_path / "other", "qwen3_vl", weights=False, patch=PATCH)
    file = other / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"patch_size": 8}))
    with pytest.raises(DataError, match="preprocessor_config.json has .* config.json's vision tower"):
        load_image_processor(other, DataConfig(train="unused"))
    with pytest.raises(DataError, match="data.max_image_tokens=3: must be at least 10"):
        size = {"min_pixels": 640, "max_pixels": 6400, "patch_size": PATCH}
        file.write_text(json.dumps(json.loads(file.read_text()) | size))
        load_image_processor(other, DataConfig(train="unused", max_image_tokens=3))
    file.unlink()
    with pytest.raises(DataError, match="its image processor cannot be loaded"):
        load_image_processor(other, DataConfig(train="unused"))
