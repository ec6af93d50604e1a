"""Configurations of adapters that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl import cli
from tests.conftest import TinyModels
from tests.helpers.bad_configs import DENSE
from tests.helpers.train_tools import write_config

EXPERTS = {
    **DENSE,
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
}

REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no such layer": (
        ("actor.lora.targets=[q_proj, w1]",),
        ("actor.lora.targets", "no linear layer w1", "q_proj, k_proj, v_proj, o_proj, gate_proj"),
    ),
    "no layer": (("actor.lora={targets: []}",), ("actor.lora.targets", "names no layer")),
    "weights from nowhere": (
        ("actor.lora={}", "model.from_scratch=true"),
        ("actor.lora", "model.from_scratch", "need base weights on disk"),
    ),
    "fp8": (
        ("actor.lora={}", "actor.precision.fp8={recipe: current, emulate: true}"),
        ("actor.lora", "actor.precision.fp8.recipe", "does not work with current", "16 or 32 bits"),
    ),
    "Muon": (
        ("actor.lora={}", "actor.optimizer.muon={}"),
        ("actor.optimizer.muon", "actor.lora", "does not train adapters"),
    ),
    "a layout of the reference": (
        ("actor.lora={}", "algorithm.kl={use_in_loss: true}", "ref.max_tokens_per_microbatch=64"),
        ("ref.max_tokens_per_microbatch", "actor.lora", "the reference is the actor without its adapters"),
    ),
    "adapters to be sent, and none": (
        ("sync.lora=adapter",),
        ("sync.lora", "actor.lora", "the actor trains all weights"),
    ),
    "an engine for whole weights": (
        ("actor.lora={}", "sync.lora=adapter", "rollout.engine=transformers"),
        ("sync.lora", "rollout.engine", "takes whole weights only"),
    ),
    "magnitudes that SGLang would leave out": (
        ("actor.lora={dora: true}", "sync.lora=adapter"),
        ("sync.lora", "actor.lora.dora", "SGLang does not support DoRA"),
    ),
    "memory that nothing fills again": (
        ("actor.lora={}", "sync.lora=adapter", "rollout.release=all"),
        ("sync.lora", "rollout.release", "does not restore the released base weights"),
    ),
    "buckets of adapters": (
        ("actor.lora={}", "sync.lora=adapter", "sync.bucket_mib=3"),
        ("sync.bucket_mib", "sync.lora", "no effect"),
    ),
    "a frozen critic": (
        ("algorithm.adv_estimator=gae", "critic={frozen: true, lora: {}}"),
        ("critic.lora", "critic.frozen", "no effect"),
    ),
}

REFUSED_EXPERTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "experts that are sent": (
        ("actor.lora={}", "actor.layers=local", "sync.lora=adapter"),
        ("sync.lora", "actor.lora.targets", "adapters of experts can only be synced merged"),
    ),
    "experts of joined layers": (("actor.lora={}",), ("actor.lora.targets", "actor.layers", "need local layers")),
    "experts that are cut": (
        ("actor.lora={}", "actor.layers=local", "actor.parallel={tensor: 2}"),
        ("actor.parallel.expert_tensor", "actor.lora.targets", "need 1, not 2"),
    ),
}


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_EXPERTS])
def test_what_contradicts_adapters_is_refused_by_both_keys(
    case: str, tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    if case in REFUSED:
        model = tiny_models("llama")
    else:
        model.mkdir()
        (model / "config.json").write_text(json.dumps(EXPERTS))
    overrides, said = (REFUSED | REFUSED_EXPERTS)[case]
    config = write_config(tmp_path, model)
    assert cli.main(["plan", str(config), "--gpu", "none", *overrides]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert all(part in shown for part in said), shown
