"""Engines of vision-language models compared with each other and with the trainer's files. Both generate the same
tokens before and after a sync that changes the vision tower, whether an engine has one process or two."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from mrl.config.schema import DataConfig, RolloutConfig, SyncConfig
from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.data import PromptDataset, load_image_processor, load_tokenizer
from mrl.inference.engine import Engine
from mrl.inference.errors import RolloutError
from mrl.inference.seeds import sample_seed
from mrl.inference.start import start_engine
from mrl.weights.sync.weight_sync import WeightSync
from tests.helpers.served import Served, check_transport
from tests.helpers.slow import slow_cases
from tests.helpers.sync_tools import FileExporter
from tests.helpers.tiny_vl import make_tiny_vl
from tests.helpers.vision_rows import write_rows

pytestmark = [
    pytest.mark.long,
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="the engine tests need sglang"),
]
FAMILIES = ("qwen3_vl", *slow_cases("qwen2_5_vl"))
PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 4}  # SGLang's Qwen2.5-VL supports no other size
TENSOR = {"qwen2_5_vl": 1, "qwen3_vl": 2}
FFN = 128  # width of the tower's MLP; on a CPU with two ranks SGLang pads to a multiple of 64
SAMPLES = 3  # per prompt


@dataclass(frozen=True)
class Both:
    """sglang: an engine of TENSOR processes; transformers: mrl's engine with the same weights"""

    sglang: Served
    transformers: Served
    prompts: list[Prompt]

    def draw(self) -> tuple[list[Sample], list[Sample]]:
        """Returns both engines' samples of the same requests: several for each prompt with its images."""
        asked = [
            Request(n, n % len(self.prompts), self.prompts[n % len(self.prompts)], sample_seed(1, 0, n))
            for n in range(SAMPLES * len(self.prompts))
        ]
        params = SamplingParams(temperature=0.9, max_new_tokens=12)
        return self.sglang.engine.generate(asked, params), self.transformers.engine.generate(asked, params)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Both]]:
    """Starts all servers at once, so that their starts share the machine's cores."""
    root, found = tmp_path_factory.mktemp("vision_engines"), {}
    write_rows(root)
    with contextlib.ExitStack() as stack:
        for family in FAMILIES:
            old, new = (
                make_tiny_vl(root / f"{family}_{i}", family, seed=i, patch=PATCH[family], ffn=FFN) for i in range(2)
            )
            served = []
            for name, tensor in (("sglang", TENSOR[family]), ("transformers", 1)):
                cfg, logs = RolloutConfig(engine=name, tensor=tensor), tmp_path_factory.mktemp(f"{family}_{name}")
                engine = stack.enter_context(start_engine(cfg, str(old), "float32", logs))
                served.append(Served(engine, old, new, tensor))
            found[family] = Both(*served, prompts(root, old))
        for each in found.values():
            each.sglang.engine.wait_ready()
            each.transformers.engine.wait_ready()
        yield found


def prompts(root: Path, model: Path) -> list[Prompt]:
    """Returns prompts with one image, none and two. One image has transparent pixels, one is grey, all are resized."""
    cfg = DataConfig(train=str(root / "rows.jsonl"), chat_template=True, shuffle=False)
    found = PromptDataset(
        cfg.train, cfg, load_tokenizer(model), image_processor=load_image_processor(model, cfg)
    ).first(6)
    assert [len(prompt.pictures) for prompt in found] == [1, 0, 2, 1, 0, 2]
    return found


def assert_the_same(samples: tuple[list[Sample], list[Sample]]) -> None:
    ours, theirs = samples
    assert [s.response_ids.tolist() for s in ours] == [s.response_ids.tolist() for s in theirs]
    assert max(np.abs(a.log_probs - b.log_probs).max() for a, b in zip(ours, theirs, strict=True)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_both_engines_draw_the_same_of_the_same_pictures_before_and_after_a_push(
    both: dict[str, Both], family: str
) -> None:
    """Tokens and log-probs agree before and after a sync. No features of older weights remain cached, and each rank of
    a split engine has the whole tower."""
    one = both[family]
    before = one.draw()
    assert_the_same(before)
    for served in (one.sglang, one.transformers):
        with contextlib.closing(served.sync()) as sync:
            report = sync.update_weights("1")
            assert report.verified == report.tensors == len(FileExporter(served.new).tensors)
    after = one.draw()
    assert_the_same(after)
    pictured = [n for n, sample in enumerate(after[0]) if sample.request.prompt.pictures]
    assert all(before[0][n].log_probs[0] != after[0][n].log_probs[0] for n in pictured)
    for served in (one.sglang, one.transformers):
        served.load(served.old)


@pytest.mark.parametrize("transport", ["http", "distributed", "disk"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_over_every_transport(both: dict[str, Both], family: str, transport: str) -> None:
    one = both[family].sglang
    check_transport(one, transport, one.load(one.new))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_alone_changes_what_is_drawn_of_pictures_alone(both: dict[str, Both], family: str) -> None:
    """A sync of the tower alone changes only samples of prompts with images. The decoder's tensors stay the same."""
    one = both[family].sglang
    before, _ = both[family].draw()
    exporter, old = FileExporter(one.new), FileExporter(one.old)
    exporter.tensors = {
        name: tensor if "visual." in name else old.tensors[name] for name, tensor in exporter.tensors.items()
    }
    cfg = SyncConfig(verify="checksum", timeout_s=60.0)
    access = one.engine.pool.access
    with contextlib.closing(WeightSync(exporter, one.engine.urls, cfg, one.tensor, access=access)) as sync:
        sync.update_weights("1")
    after, _ = both[family].draw()
    one.load(one.old)
    for a, b in zip(before, after, strict=True):
        same = abs(a.log_probs[0] - b.log_probs[0]) < 1e-6
        assert same is not bool(a.request.prompt.pictures)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ["sglang", "transformers"])
def test_a_request_with_other_tokens_than_pictures_is_an_error_of_every_engine(
    both: dict[str, Both], family: str, engine: str
) -> None:
    """Every engine refuses a prompt whose number of image tokens is that of the features. SGLang would count them as
    images, or use another prompt."""
    one: Engine = vars(both[family])[engine].engine
    prompts = both[family].prompts
    prompt = next(
        each for each in prompts if each.pictures and len(each.token_ids) > len(each.unexpanded_token_ids or ())
    )
    wrong = replace(prompt, unexpanded_token_ids=None)
    with pytest.raises(RolloutError) as refused:
        one.generate([Request(0, 0, wrong, 1)], SamplingParams(max_new_tokens=2))
    assert not any(base64.b64encode(picture[39:66]).decode() in str(refused.value) for picture in prompt.pictures)
