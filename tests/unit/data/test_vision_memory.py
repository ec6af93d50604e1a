"""Memory of rows with images: neither opening nor training on them keeps their images in memory."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
import pytest

from mrl.config.schema import DataConfig
from mrl.core import Request, Sample
from mrl.data import PromptDataset, collate, image_store, load_image_processor, load_tokenizer
from mrl.data.image_positions import image_positions
from mrl.data.image_store import ImageStore
from tests.helpers.tiny_vl import make_tiny_vl
from tests.unit.data.test_vision_data import dataset, picture, stored, url


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vl(tmp_path_factory.mktemp("vl") / "model", "qwen3_vl", weights=False)


def test_memory_does_not_grow_with_pixels(tmp_path: Path, model: Path) -> None:
    rows = [{"images": [url(stored(picture(64, 64)))]} for _ in range(8)]
    data = dataset(tmp_path, model, *rows)
    image_processor = load_image_processor(model, data.cfg)
    assert image_processor is not None
    samples = [
        Sample(Request(i, i, p, 1), [7], [-1.0], "stop", "0") for i, p in enumerate(data.prompts_for_step(0, 8, 1))
    ]
    images = image_positions(collate(0, samples), image_processor.vision).images
    store = ImageStore(data.cfg.train, image_processor)
    one = store(images[:1]).nbytes
    kept = image_store.KEPT_BYTES
    try:
        image_store.KEPT_BYTES = 3 * one
        store(images)
        assert store._bytes <= 3 * one and len(store._kept) == 3
    finally:
        image_store.KEPT_BYTES = kept


def held_and_peak(make: Callable[[], PromptDataset]) -> tuple[int, int]:
    """Returns the bytes of Python and numpy that are allocated after opening the rows, and their peak."""
    gc.collect()
    tracemalloc.start()
    try:
        data = make()
        gc.collect()
        held, peak = tracemalloc.get_traced_memory()
        assert len(data)
        return held, peak
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", ["parquet", pytest.param("paths", marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_pictures_of_the_rows(tmp_path: Path, model: Path, form: str) -> None:
    """Memory does not grow with the images of the rows. Opening 200 rows takes only the memory of their texts and
    tokens, whether images are in a parquet file or in files beside JSON lines."""
    noise = stored(picture(96, 96))
    tokenizer = load_tokenizer(model)

    def write(count: int) -> DataConfig:
        file = tmp_path / f"{count}.{'parquet' if form == 'parquet' else 'jsonl'}"
        if form == "parquet":
            features = datasets.Features(
                {"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())}
            )
            images = [[{"bytes": noise, "path": None}]] * count
            datasets.Dataset.from_dict({"prompt": ["what?"] * count, "images": images}, features).to_parquet(file)
        else:
            (tmp_path / "noise.png").write_bytes(noise)
            file.write_text('{"prompt": "what?", "images": ["noise.png"]}\n' * count)
        return DataConfig(train=str(file), chat_template=True, max_prompt_tokens=512)

    def opened(cfg: DataConfig) -> PromptDataset:
        return PromptDataset(cfg.train, cfg, tokenizer, image_processor=load_image_processor(model, cfg))

    configs = [write(count) for count in (20, 220)]
    for cfg in configs:  # excludes imports and the library's own copy of a parquet file
        opened(cfg)
    few, many = (held_and_peak(partial(opened, cfg)) for cfg in configs)
    for growth in (many[0] - few[0], many[1] - few[1]):
        assert growth < 200 * len(noise) / 8, (few, many, len(noise))
