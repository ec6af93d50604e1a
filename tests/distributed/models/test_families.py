"""Families with several kinds of layers: log-probs and all gradients equal those of transformers in float64."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.slow import slow_cases
from tests.helpers.tiny import DELTA_FAMILIES, MOONLIGHT, make_tiny
from tests.helpers.world import run_world
from tests.worlds.families import reference

pytestmark = pytest.mark.long

EXPERTS = ("tp2.ep2", "pp2.vpp2", *slow_cases("pp2.ep2", "cp2.ep2", "tp2.ep2.etp2"))
DENSE = ("tp2.pp2", "cp2", *slow_cases("tp2", "tp2.sequence0", "pp2", "tp2.cp2", "pp2.vpp2"))
SIZE: dict[str, Any] = {"num_hidden_layers": 4, "num_key_value_heads": 4, "vocab_size": 313}
ALL_MODELS: dict[str, dict[str, Any]] = {
    "glm4_moe": {},
    "glm4_moe_air": {
        "use_qk_norm": False,
        "first_k_dense_replace": 2,
        "num_experts_per_tok": 4,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "initializer_range": 0.1,  # larger weights would make float32's own rounding visible
    },
    "gemma3_text": {},
    "deepseek_v3": {"initializer_range": 0.1, "rms_norm_eps": 0.05},  # not that of the latent norms
    "moonlight": MOONLIGHT | {"initializer_range": 0.1},
    "qwen2_moe": {"initializer_range": 0.1, "mlp_only_layers": [1]},
    "olmo2": {},
    "phi3": {"num_key_value_heads": 2},
    "olmo3": {"layer_types": 2 * ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 1, 0, 1], "tied": True},
    "gpt_oss": {"initializer_range": 0.1},
    **dict.fromkeys(DELTA_FAMILIES, {"initializer_range": 0.05}),
}
NAMES = ("glm4_moe", "gemma3_text", "deepseek_v3", "gpt_oss", *slow_cases("glm4_moe_air", "moonlight", "qwen2_moe"))
NAMES += slow_cases("olmo2", "phi3", "olmo3", "smollm3")
NAMES += DELTA_FAMILIES
MODELS = {name: ALL_MODELS[name] for name in NAMES}
UNCUT = (
    "tp2.cp2.ep2/selective",
    "critic:pp2.ep2",
    *slow_cases("tp2.ep2", "pp2.ep2/full", "cp2.ep2", "pp2.vpp2", "critic:tp2.ep2/full"),
)  # layouts that do not split experts over tensor-parallel ranks
MOE = ("glm4_moe", "glm4_moe_air", "deepseek_v3", "moonlight", "qwen2_moe")
FAMILY = {"glm4_moe_air": "glm4_moe", "moonlight": "deepseek_v3"}  # the other models are named after their family
DELTA = {
    "qwen3_next": ("tp2.ep2", "pp2.ep2", "cp2.ep2", "critic:tp2.cp2", *slow_cases("tp2.ep2.etp2", "pp2.vpp2/full")),
    "qwen3_5_text": ("tp2.pp2/selective", "cp2", "tp2.sequence0", *slow_cases("cp4", "pp2.vpp2/full", "tp4")),
    "qwen3_5_moe_text": ("tp2.ep2", *slow_cases("pp2.ep2", "cp2.ep2")),
}
DELTA = {name: DELTA[name] for name in DELTA_FAMILIES}
LAYOUTS = {name: EXPERTS if name in MOE else DENSE for name in MODELS} | {"gpt_oss": UNCUT} | DELTA
BOTH = dict.fromkeys(("gpt_oss", *DELTA_FAMILIES[:1]), ("one", "critic:one"))
ALONE = dict.fromkeys(MODELS, ("one",)) | BOTH


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("families")
    jobs = []
    for name, settings in MODELS.items():
        roles = ("policy", "critic") if "critic:one" in ALONE[name] else ("policy",)
        reference(make_tiny(root / name, FAMILY.get(name, name), **SIZE | settings), *roles)
        jobs.append(f"{root / name}={','.join(LAYOUTS[name])}")
    run_world(1, "families.py", root / "one.json", *(f"{root / name}={','.join(ALONE[name])}" for name in MODELS))
    run_world(4, "families.py", root / "four.json", *jobs)
    one, four = (json.loads((root / f"{name}.json").read_text()) for name in ("one", "four"))
    return {name: one[name] | four[name] for name in MODELS}


@pytest.mark.parametrize(("model", "layout"), [(name, x) for name in MODELS for x in (*ALONE[name], *LAYOUTS[name])])
def test_log_probs_and_gradients_are_transformers(results: dict[str, Any], model: str, layout: str) -> None:
    log_prob, gradient, worst = results[model][layout]
    assert log_prob < 2e-5 and gradient < 1e-5, (log_prob, gradient, worst)


def test_a_router_s_bias_stays_float32_in_a_bfloat16_model(results: dict[str, Any]) -> None:
    """A router's bias stays float32 in a bfloat16 model. It decides between nearly equal experts; if rounded, it would
    choose other experts than the engine."""
    biases = {f"model.layers.{i}.mlp.gate.e_score_correction_bias": "torch.float32 kept" for i in (1, 2, 3)}
    assert results["glm4_moe"]["bfloat16"] == biases
