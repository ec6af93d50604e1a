"""Settings that a model family or an engine does not support are refused before a process starts, with a remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mrl.config.loader import load
from mrl.config.problems import ConfigError
from tests.conftest import TinyModels
from tests.helpers.bad_configs import PPO
from tests.helpers.tiny import HAS_DELTA_NETS

EMULATED = "actor.precision.fp8={recipe: current, emulate: true}"
ADAPTERS = ("actor.lora={rank: 4}", "sync.lora=adapter", "actor.optimizer.lr=1e-4")
ONE: dict[str, Any] = {}
PACKED = {"quantization_config": {"quant_method": "mxfp4"}}
REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...], int, str, str]] = [
    ("deepseek_v3", ONE, (EMULATED,), 0, "actor.precision.fp8.emulate", "multi-head latent attention.*recipe: none"),
    ("gemma3_text", ONE, ("actor.precision.fp8={recipe: current}",), 4, "actor.precision.fp8.recipe", "emulate: true"),
    ("olmo2", ONE, ("actor.precision.fp8={recipe: current}",), 4, "actor.precision.fp8.recipe", "norms over all heads"),
    ("gemma3_text", ONE, ADAPTERS, 0, "sync.lora", "adapters of gemma3_text can only be synced merged: set merge"),
    ("smollm3", ONE, ADAPTERS, 0, "sync.lora", "adapters of smollm3 can only be synced merged: set merge"),
    ("deepseek_v3", ONE, ("rollout.quantization=fp8",), 4, "rollout.quantization", "engines fuse: leave it out"),
    ("smollm3", ONE, ("rollout.tensor=2",), 0, "rollout.engine", "smollm3 on one rank only: set rollout.tensor: 1"),
    ("smollm3", ONE, ("rollout.quantization=fp8",), 4, "rollout.engine", "transformers' modules, not in fp8"),
    ("phi3", ONE, ("rollout.quantization=fp8",), 4, "rollout.engine", "fused fp8 projections of phi3"),
    ("olmo2", ONE, ("rollout.tensor=4",), 0, "rollout.engine", "set rollout.tensor to 2 or less"),
    (
        "qwen2_moe",
        {"mlp_only_layers": [1]},
        (),
        0,
        "rollout.engine",
        "experts in all layers of qwen2_moe: set rollout.engine: transformers",
    ),
    ("phi3", ONE, ("actor.lora={rank: 4}",), 0, "actor.lora.targets", "fused layers qkv_proj, gate_up_proj"),
    ("glm4_moe", ONE, ("actor.layers=transformer_engine", "model.dtype=float32"), 4, "actor.layers", "TF32"),
    ("gpt_oss", ONE, (), 0, "rollout.engine", "no attention with sinks on CPUs .*: set rollout.engine: transformers"),
    ("gpt_oss", ONE, ("rollout.quantization=fp8",), 4, "rollout.engine", "fp8 experts of gpt_oss"),
    (
        "gpt_oss",
        ONE,
        ("actor.parallel.tensor=2",),
        2,
        "actor.parallel.expert_tensor",
        "tensor 2, that needs expert 2 or",
    ),
    (
        "gpt_oss",
        ONE,
        ("actor.lora={rank: 4, targets: [gate_up_proj]}",),
        0,
        "actor.lora.targets",
        "no linear layer gate",
    ),
    (
        "gpt_oss",
        PACKED,
        ("rollout.engine=transformers",),
        0,
        "model.path",
        "packed.*mrl convert hf-to-megatron and then",
    ),
    ("gpt_oss", PACKED, ADAPTERS[:1], 0, "model.path", "packed, and adapters cannot be merged"),
    ("gpt_oss", ONE, (EMULATED,), 0, "actor.precision.fp8.emulate", "do not support experts with biases"),
    (
        "olmo3",
        ONE,
        ("actor.layers=transformer_engine",),
        4,
        "actor.layers",
        "windows and rotary embeddings that differ by layer",
    ),
]
if HAS_DELTA_NETS:
    REFUSED += [
        (
            "qwen3_next",
            ONE,
            (),
            0,
            "rollout.engine",
            "gated delta nets of qwen3_next: set rollout.engine: transformers",
        ),
        (
            "qwen3_next",
            ONE,
            (),
            4,
            "rollout.engine",
            "gated delta nets of qwen3_next: set rollout.engine: transformers",
        ),
        ("qwen3_5_text", ONE, (EMULATED,), 0, "actor.precision.fp8.emulate", "gated delta nets.*recipe: none"),
        ("qwen3_5_text", ONE, ("actor.layers=transformer_engine",), 4, "actor.layers", "gated delta nets: use auto or"),
        (
            "qwen3_5_text",
            {"linear_num_key_heads": 2},
            ("actor.parallel={tensor: 2, context: 2}",),
            0,
            "actor.parallel.context",
            "tensor 2 x context 2 does not divide the 2 key heads of .*: use a context that divides 1",
        ),
        (
            "qwen3_5_text",
            {"linear_num_key_heads": 1},
            (),
            0,
            "actor.parallel.tensor",
            "2 does not divide the model's 1 key heads of its gated delta nets",
        ),
    ]


@pytest.mark.parametrize(("family", "model", "overrides", "gpus", "key", "says"), REFUSED)
def test_refused_by_name_with_what_to_do(
    tiny_models: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    model: dict[str, Any],
    overrides: tuple[str, ...],
    gpus: int,
    key: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tiny_models(family, weights=False, **model)
    Path("train.jsonl").write_text('{"prompt": "21=", "answer": "12."}\n')
    Path("c.yaml").write_text(PPO.replace("path: dense", f"path: {path}"))
    with pytest.raises(ConfigError) as caught:
        load("c.yaml", overrides, gpus=gpus)
    found = [str(problem) for problem in caught.value.problems if problem.keys[0] == key]
    assert any(re.search(says, text) for text in found), str(caught.value)
