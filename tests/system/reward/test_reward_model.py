"""A reward model has transformers' scores, computed by Megatron under every layout and by an SGLang server."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from mrl.config.schema import RewardConfig, RewardModelConfig, RolloutConfig
from mrl.core import Prompt, Request, Sample
from mrl.families import FAMILIES, VALUE_HEAD_SUFFIX, load_arch
from mrl.inference.launch import CPU, Launch, ServerSpec
from mrl.inference.process import EngineProcess
from mrl.inference.sglang.command import sglang_launch
from mrl.ports import free_port
from mrl.reward.manager import RewardManager
from mrl.reward.server import BIASED_IN_SGLANG
from mrl.trainers.rl.reward_scores import of_heads
from mrl.weights.disk.model_files import copy_model_files
from tests.helpers.slow import slow_cases
from tests.helpers.tiny import DELTA_FAMILIES, make_tiny
from tests.helpers.world import run_world

LAYOUTS = [{"tensor": 2}, {"pipeline": 2}, {"context": 2}, {}]


@pytest.fixture(
    scope="module", params=["qwen2", "deepseek_v3", *slow_cases("gemma3_text", "qwen2_moe"), *DELTA_FAMILIES[1:2]]
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reward_model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward_model")
    make_tiny(folder / "policy", family)
    config = AutoConfig.from_pretrained(folder / "policy", num_labels=1, tie_word_embeddings=False)
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "reward")
    return folder / "reward"


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(3, 250) for _ in range(length)] for length in (2, 40, 7, 8, 63, 5, 30)]


@pytest.fixture(scope="module")
@torch.no_grad()
def wanted(reward_model: Path, sequences: list[list[int]]) -> Tensor:
    theirs = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32).eval()
    scores = torch.tensor([theirs(torch.tensor([ids])).logits.item() for ids in sequences])
    assert scores.std() > 0.01
    return scores


def gap(scores: list[float], wanted: Tensor) -> float:
    return float((torch.tensor(scores) - wanted).abs().max() / wanted.abs().max())


@pytest.fixture(scope="module")
def found(reward_model: Path, sequences: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with result.json, mrl's scores by layout, and `exported`, the model as mrl exports it."""
    folder = tmp_path_factory.mktemp("found")
    (folder / "sequences.json").write_text(json.dumps(sequences))
    files = (reward_model, folder / "sequences.json", folder / "result.json")
    run_world(2, "reward_model.py", *files, json.dumps(LAYOUTS))
    return folder


def test_megatron_gives_the_scores_of_transformers_under_every_layout(found: Path, wanted: Tensor) -> None:
    for layout, scores in zip(LAYOUTS, json.loads((found / "result.json").read_text()), strict=True):
        assert gap(scores, wanted) < 1e-4, (layout, scores, wanted)


@torch.no_grad()
def test_transformers_scores_a_padded_batch_of_the_export_alike(
    found: Path, sequences: list[list[int]], wanted: Tensor
) -> None:
    theirs = AutoModelForSequenceClassification.from_pretrained(found / "exported", dtype=torch.float32).eval()
    pad, longest = theirs.config.pad_token_id, max(map(len, sequences))
    ids = torch.tensor([[*text, *(longest - len(text)) * [pad]] for text in sequences])
    assert gap(theirs(ids, attention_mask=(ids != pad).long()).logits[:, 0].tolist(), wanted) < 1e-4


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="the engine tests need sglang")
@pytest.mark.parametrize("family", ["qwen2"], indirect=True)
def test_a_real_server_gives_the_scores_of_transformers_for_what_mrl_exports(
    found: Path, sequences: list[list[int]], wanted: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang, started with --is-embedding as a user starts it, serves mrl's export with transformers' scores. Its head
    has a bias, which is random if the export has none."""
    cfg, port = RolloutConfig(server_args=("--is-embedding",)), free_port()

    def launch(folder: Path) -> Launch:
        return sglang_launch(ServerSpec(cfg, str(found / "exported"), "float32", port, 0, 0, CPU, folder=folder))

    with contextlib.closing(EngineProcess("rm", launch, port, tmp_path / "log")) as server:
        server.wait_ready(300)
        reward = {"manager": "model", "servers": {"rm": {"url": server.url, "api": "sglang", "timeout_s": 60.0}}}
        samples = [
            Sample(Request(i, i, Prompt(i, tuple(ids[:1]), {"prompt": "-"}), i), ids[1:], [], "stop", "0", "-")
            for i, ids in enumerate(sequences)
        ]
        with RewardManager(RewardConfig.model_validate(reward)) as manager:
            manager.collect(samples)
    scores = [sample.score for sample in samples]
    assert gap(scores, wanted) < 1e-4, (scores, wanted)
    assert "serves a Qwen2ForSequenceClassification, whose score head has a bias in SGLang" in caplog.text


def test_a_model_in_a_recipe_and_a_score_that_is_none() -> None:
    from tests.system.reward.test_reward_managers import of

    recipe = {"chat": {"model": 0.5, "exact_match": 1.0}, "*": {"exact_match": 1.0}}
    cfg = {"manager": "recipe", "recipe": recipe, "model": {"path": "-"}, "on_error": "zero", "workers": 1}
    samples = [of("chat", 0, tokens=2), of("chat", 1, tokens=3), of("quiz", 2)]
    with RewardManager(RewardConfig.model_validate(cfg)) as manager:
        manager.score_model = lambda samples: [4.0 if len(s.token_ids) == 3 else float("nan") for s in samples]
        manager.collect(samples)
    assert [s.score for s in samples] == [3.0, 0.0, 1.0]
    assert samples[0].score_parts == {"model": 4.0, "exact_match": 1.0}
    assert "reward model on sample 1 " in samples[1].reward_error and "got nan" in samples[1].reward_error


def test_what_is_known_of_the_engine_s_heads_is_said_once() -> None:
    biased = {family.architecture for family in FAMILIES.values() if family.engine_score_bias}
    assert biased == {name.replace(VALUE_HEAD_SUFFIX, "ForCausalLM") for name in BIASED_IN_SGLANG}


@pytest.mark.parametrize(
    ("heads", "std_coef", "want"), [("mean", 0.0, [2.0, 3.0]), ("mean", 0.5, [1.5, 3.0]), ("min", 0.0, [1.0, 3.0])]
)
def test_of_an_ensemble_s_scores_one_is_made(heads: str, std_coef: float, want: list[float]) -> None:
    cfg = RewardModelConfig.model_validate({"path": "-", "heads": heads, "std_coef": std_coef})
    assert of_heads(torch.tensor([[1.0, 3.0], [3.0, 3.0]]), cfg).tolist() == want


@pytest.mark.parametrize(
    ("config", "settings", "want"),
    [
        ({"eos_token_id": 2, "pad_token_id": 0}, {"pad_token": "<pad>"}, (0, "<pad>")),
        ({"eos_token_id": 2, "pad_token_id": 2}, {"pad_token": "</s>"}, (1, "<s>")),
        ({"eos_token_id": [2, 0], "pad_token_id": None}, {"pad_token": "<pad>"}, (1, "<s>")),
        ({"eos_token_id": 2, "pad_token_id": 7}, {"pad_token": None}, (7, None)),
        ({"eos_token_id": 2}, {"pad_token": None, "bos_token": None}, (0, None)),
    ],
)
def test_the_padding_of_an_export_is_no_end(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], want: tuple[int, str | None]
) -> None:
    """An export's padding token is not EOS. With EOS as padding transformers would take the score one token earlier."""
    make_tiny(tmp_path / "model", "llama", weights=False)
    named = json.loads((tmp_path / "model/tokenizer_config.json").read_text()) | settings
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(named))
    sizes = json.loads((tmp_path / "model/config.json").read_text())
    sizes.pop("pad_token_id")
    (tmp_path / "model/config.json").write_text(json.dumps(sizes | config))
    (tmp_path / "export").mkdir()
    arch = load_arch(tmp_path / "model")
    copy_model_files(tmp_path / "model", tmp_path / "export", torch.float32, arch, "critic")
    made, tokens = (
        json.loads((tmp_path / f"export/{name}.json").read_text()) for name in ("config", "tokenizer_config")
    )
    assert (made["pad_token_id"], tokens["pad_token"]) == want
