"""Families with several kinds of layers: the keys of their config.json that are read, and refusals."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.families import FAMILIES, Keys, UnsupportedModel, delta_nets, load_arch
from mrl.families.table import weight_table
from mrl.models.rope import inverse_frequencies
from mrl.weights.disk.model_files import copy_model_files
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.disk.unused import unused_tensors
from tests.conftest import TinyModels
from tests.helpers.tiny import HAS_DELTA_NETS


def test_layers_that_guess_further_tokens_are_left_out(tiny_models: TinyModels, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_models("glm4_moe"), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    save_file(weights | {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    arch = load_arch(model)
    with contextlib.closing(HFCheckpoint(model)) as checkpoint:
        assert list(unused_tensors(checkpoint, arch, weight_table(arch), "policy")) == []
    copy_model_files(model, tmp_path, torch.float32, arch, "policy")
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_the_hub_s_form_of_olmo_3_s_angles_is_transformers_own(tiny_models: TinyModels, tmp_path: Path) -> None:
    """The hub's form of Olmo 3's rotary embedding equals transformers' own: one base, and a scaling that applies only
    to layers with full attention."""
    path = tiny_models("olmo3", weights=False)
    config = json.loads((path / "config.json").read_text())
    by_layer = config.pop("rope_parameters")
    by_layer = {kind: table | {"rope_theta": 500000.0} for kind, table in by_layer.items()}
    scaling = {name: value for name, value in by_layer["full_attention"].items() if name != "rope_theta"}
    forms = [{"rope_parameters": by_layer}, {"rope_theta": 500000.0, "rope_scaling": scaling}]
    found = []
    for form in forms:
        (tmp_path / "config.json").write_text(json.dumps(config | form))
        found.append(inverse_frequencies(str(tmp_path), load_arch(tmp_path)))
    (one, other), kinds = found, ("full_attention", "sliding_attention")
    assert all(torch.equal(one[kind][0], other[kind][0]) and one[kind][1] == other[kind][1] for kind in kinds)
    assert one["full_attention"][1] > 1 == one["sliding_attention"][1]
    engine = FAMILIES["olmo3"].engine_config(Keys(config | forms[0], "config.json"))["rope_parameters"]
    assert engine == scaling | {"rope_theta": 500000.0}
    assert FAMILIES["olmo3"].engine_config(Keys(config | forms[1], "config.json")) == {}


GEMMA = "gemma3_text"
NEXT = "architectures say qwen3_next" if HAS_DELTA_NETS else "linear attention .* train a Qwen3"
DELTA_NETS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_next", {"linear_num_value_heads": 6}, "linear_num_value_heads must be a multiple of .* .4."),
    ("qwen3_next", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim must be an integer from 1"),
    ("qwen3_next", {"num_experts_per_tok": 1}, "num_experts_per_tok must be 2 or more"),
    ("qwen3_next", {"attention_bias": True}, "attention_bias=true"),
    ("qwen3_5_text", {"layer_types": ["full_attention", "sliding_attention"]}, "linear_attention or full_attention"),
    ("qwen3_5_text", {"layer_types": 2 * ["linear_attention"]}, "a model without full_attention layers"),
    ("qwen3_5_text", {"layer_types": ["full_attention"]}, "for each of the 2 layers"),
    ("qwen3_5_moe_text", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn"),
]


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        (GEMMA, {"hidden_activation": "silu"}, "hidden_activation='silu' .only gelu_pytorch_tanh"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
        (GEMMA, {"layer_types": ["full_attention", "chunked"]}, "layer_types must be full_attention or sliding"),
        (GEMMA, {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention.rope_type=yarn"),
        (GEMMA, {"architectures": ["Gemma3ForConditionalGeneration"]}, "supported of Gemma 3: the text models"),
        (GEMMA, {"architectures": ["DeepseekV32ForCausalLM"]}, "sparse attention .DSA. is not .*train a DeepSeek-V3"),
        (GEMMA, {"architectures": ["GlmMoeDsaForCausalLM"]}, "sparse attention .DSA. is not .* or GLM-4.5 model"),
        (GEMMA, {"architectures": ["Qwen3NextForCausalLM"]}, NEXT),
        (
            GEMMA,
            {"architectures": ["Qwen3_5MoeForConditionalGeneration"]},
            "its text model is: save transformers' Auto",
        ),
        (GEMMA, {"architectures": ["Llama4ForCausalLM"]}, "chunked attention is not supported: train a Llama 3"),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config .train from unquant"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit=6.0 .only 7.0"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 .only 1.702"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias=false"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window=null"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu' .only silu"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types must be full_attention or sliding"),
        ("gpt_oss", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type=longrope; supported: default, yarn"),
        ("gpt_oss", {"num_local_experts": 0}, "num_local_experts must be an integer from 1"),
        ("qwen2_moe", {"mlp_only_layers": [2]}, "mlp_only_layers must be layers from 0 to 1"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer from 1"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window=true"),
        ("olmo2", {"attention_bias": True}, "attention_bias=true"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types must be full_attention or sliding"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 2e4}}},
            "different rope_theta by kind of layer",
        ),
        ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "rope_type=yarn .only default"),
        ("olmo3", {"rope_parameters": None, "rope_theta": 1e4}, "different rope_theta by kind of layer"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must be 1 .rotary embeddings. or 0"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window=true"),
        ("phi3", {"sliding_window": 100}, "sliding_window=100 below max_position_embeddings"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1 .only 0"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "longrope .*longest sequence.* use Phi-4"),
        ("phi3", {"rope_parameters": None, "rope_scaling": {"type": "su"}}, "rope_scaling.* use Phi-4"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' .only sigmoid"),
        ("deepseek_v3", {"topk_group": 2}, "n_group=4 with num_experts_per_tok=2, which must be twice topk_group=2"),
        ("deepseek_v3", {"n_group": 3}, "n_group=3 .must divide n_routed_experts=8 into groups of 2 or more"),
        ("deepseek_v3", {"n_group": 8}, "n_group=8 .must divide n_routed_experts=8 into groups of 2 or more"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads .4"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config .train from unquant"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type=longrope; supported: default, yarn"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=false"),
        ("deepseek_v3", {"norm_topk_prob": None}, "norm_topk_prob=false"),
        ("llama", {"is_causal": False}, "is_causal=false .only causal attention"),
        ("gpt_oss", {"is_causal": None}, "is_causal=false .only causal attention"),
        ("llama", {"per_layer_config": {"1": {"rms_norm_eps": 0.1}}}, "per_layer_config .keys that differ by layer"),
        (
            "glm4_moe",
            {"n_group": 2, "topk_group": 2},
            "n_group=2 with num_experts_per_tok=2, which must be twice topk_group=2",
        ),
        ("glm4_moe", {"topk_group": 3, "n_group": 2}, "topk_group must be an integer from 1 to 2"),
        (
            "glm4_moe",
            {"first_k_dense_replace": 2},
            "first_k_dense_replace must be an integer below num_hidden_layers",
        ),
        ("glm4_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok must be 2 or more"),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.3}}, "an even number of a head's 32 channels"),
        ("glm4_moe", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn"),
        ("glm4_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor must be a number from"),
        *(DELTA_NETS if HAS_DELTA_NETS else ()),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    tiny_models: TinyModels, tmp_path: Path, family: str, changes: dict[str, Any], says: str
) -> None:
    config = json.loads((tiny_models(family, weights=False) / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=says):
        load_arch(tmp_path)


@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        ("deepseek_v3", {"rope_type": "yarn", "factor": 8.0, "mscale_all_dim": 0.5}),
        ("deepseek_v3", {"rope_type": "default"}),
        ("glm4_moe", {"rope_type": "default", "partial_rotary_factor": 0.25}),
        ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ],
)
def test_rope_scaling_replaces_rope_parameters_as_in_transformers(
    tiny_models: TinyModels, tmp_path: Path, family: str, scaling: dict[str, Any]
) -> None:
    """A config.json with both tables is read as one with `rope_scaling` alone."""
    config = json.loads((tiny_models(family, weights=False) / "config.json").read_text())
    scaling = {"rope_theta": 1e4, "original_max_position_embeddings": 128, **scaling}
    found = []
    for changes in ({"rope_scaling": scaling}, {"rope_scaling": scaling, "rope_parameters": None}):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        found.append(load_arch(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert found[0] == found[1] != load_arch(tmp_path)


@pytest.mark.parametrize(("installed", "has"), [("0.16.1", False), ("0.18.0", False), ("0.19.2", True), ("1.0", True)])
def test_gated_delta_nets_need_a_newer_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str, has: bool
) -> None:
    """Gated delta nets need a newer release; with an older one this is the only error, and nothing else is checked."""
    monkeypatch.setattr(delta_nets.metadata, "version", lambda name: installed)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3_5MoeForCausalLM"]}))
    says = "lacks 'num_experts'|model_type" if has else f"packed form in megatron-core {installed}: use Python 3.12"
    with pytest.raises(UnsupportedModel, match=says):
        load_arch(tmp_path)
