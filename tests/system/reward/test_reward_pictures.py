"""Images of the prompts reach all scorers: user functions, single and batched, and reward servers."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mrl.config.loader import load
from mrl.config.problems import ConfigError
from mrl.config.schema import RewardConfig
from mrl.core import Sample
from mrl.reward.manager import RewardManager
from tests.system.reward.test_reward_pool import sample
from tests.unit.reward.test_reward_server import FakeServer, fake, open_manager  # noqa: F401 - a fixture

FILE = """
def one(prompt, response, row, pictures):
    return sum(picture.getpixel((0, 0))[0] for picture in pictures)

def many(prompts, responses, rows, pictures):
    return [one(*each) for each in zip(prompts, responses, rows, pictures)]
"""
REDS = [(), (10,), (20, 30)]


def png(red: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 2), (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def samples() -> list[Sample]:
    made = []
    for i, reds in enumerate(REDS):
        each = sample(i)
        prompt = replace(each.request.prompt, pictures=tuple(map(png, reds)))
        made.append(Sample(replace(each.request, prompt=prompt), [], [], "stop", "0", str(i)))
    return made


@pytest.mark.parametrize(("manager", "name"), [("naive", "one"), ("batch", "many")])
def test_functions_get_what_the_model_sees(tmp_path: Path, manager: str, name: str) -> None:
    (tmp_path / "reward.py").write_text(FILE)
    spec = {"manager": manager, "function": f"{tmp_path / 'reward.py'}:{name}", "pictures": True}
    scored = samples()
    with RewardManager(RewardConfig.model_validate(spec)) as rewards:
        rewards.collect(scored)
    assert [each.score for each in scored] == [sum(reds) for reds in REDS]


def test_servers_get_them_as_png_and_only_where_they_are_asked_for(fake: FakeServer) -> None:  # noqa: F811
    fake.speak = lambda answer: answer.send({"scores": [len(one["pictures"]) for one in answer.body["samples"]]})
    scored = samples()
    server = {"url": fake.url, "retries": 0, "batch_size": 3}
    spec = {"manager": "remote", "servers": {"judge": server}, "pictures": True}
    with RewardManager(RewardConfig.model_validate(spec)) as rewards:
        rewards.collect(scored)
    assert [each.score for each in scored] == [len(reds) for reds in REDS]
    sent = [base64.b64decode(text) for body in fake.bodies for one in body["samples"] for text in one["pictures"]]
    assert sorted(sent) == sorted(png(red) for reds in REDS for red in reds)

    fake.speak = lambda answer: answer.send({"scores": ["pictures" in one for one in answer.body["samples"]]})
    scored = samples()
    with open_manager(fake.url) as rewards:
        rewards.collect(scored)
    assert not any(each.score for each in scored)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            "{function: exact_match, pictures: true}",
            "only functions of your files and servers with api: mrl read images",
        ),
        ("{function: 'FILE:one', pictures: true}", "reward.pictures: has no effect: the model reads no images"),
    ],
)
def test_where_it_has_no_effect_it_is_refused(tiny_models: Any, tmp_path: Path, reward: str, message: str) -> None:
    (tmp_path / "reward.py").write_text(FILE)
    (tmp_path / "run.yaml").write_text(f"""
trainer: rl
run: {{name: x, steps: 1, nproc: 1}}
model: {{path: {tiny_models("llama")}, dtype: float32}}
data: {{train: {tmp_path}/rows.jsonl, max_prompt_tokens: 8}}
batch: {{prompts_per_step: 2}}
algorithm: {{adv_estimator: grpo}}
rollout: {{engine: transformers, sampling: {{max_new_tokens: 4}}}}
reward: {reward.replace("FILE", f"{tmp_path}/reward.py")}
""")
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "run.yaml")
    assert message in str(refused.value)
