"""Tiny random Hugging Face model directories of every supported family, with a small byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from mrl.families.qwen3_next import Qwen3Next

HAS_DELTA_NETS = Qwen3Next().unavailable() is None  # these families need the newer megatron-core
DELTA_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text") if HAS_DELTA_NETS else ()
MOE_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", *DELTA_FAMILIES[::2])
STACKED_FAMILIES = ("gpt_oss",)  # one tensor holds all experts of a layer
DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "olmo2", "olmo3", "smollm3", "phi3")
DENSE_FAMILIES += DELTA_FAMILIES[1:2]
FAMILIES = DENSE_FAMILIES + MOE_FAMILIES + STACKED_FAMILIES
MOONLIGHT: dict[str, Any] = {  # DeepSeek-V3's architecture without yarn, expert groups and the compressed query
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
PAD, BOS, EOS = 0, 1, 2

_BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "initializer_range": 0.2,  # large, so that a random model's distribution is peaked and the temperature matters
}
_DELTA: dict[str, Any] = {
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_SHARED: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA | _SHARED,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _SHARED,
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
    },
    "olmo2": {},
    "olmo3": {
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50000.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    },
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    "smollm3": {"no_rope_layers": [1, 0]},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "num_mtp_layers": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "gpt_oss": {
        "head_dim": 32,
        "sliding_window": 16,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
    },
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "glm4_moe": {
        "head_dim": 32,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "num_mtp_layers": 0,
    },
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer in which every byte is a token (259 in all), so that every text has a lossless encoding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": PAD, "<s>": BOS, "</s>": EOS} | {c: i + 3 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return fast


def make_tiny(
    directory: Path,
    family: str,
    *,
    tied: bool | None = None,
    seed: int = 0,
    weights: bool = True,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Writes config.json, tokenizer and (unless `weights` is false) safetensors of a random model; returns `directory`.

    `overrides` go into the config: `make_tiny(d, "llama", num_hidden_layers=4)`.
    """
    is_tied = family == "gemma3_text" if tied is None else tied  # the published config.json lacks the key
    settings = {**_BASE, "tie_word_embeddings": is_tied, **_FAMILY[family], **overrides}
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    if weights:
        _randomise_vectors(model)
        model.save_pretrained(directory)
    else:
        config.architectures = [type(model).__name__]
        config.dtype = dtype
        config.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def _randomise_vectors(model: torch.nn.Module) -> None:
    """Randomizes norm weights and biases. Their initial values 1 and 0 would hide a swapped or dropped tensor."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("_bias"):
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        if name.endswith("self_attn.sinks"):
            parameter.data.copy_(torch.randn_like(parameter))
        if name.endswith("A_log"):  # with transformers' initialization a state forgets everything within a few tokens
            parameter.data.copy_(torch.randn_like(parameter) - 3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn_like(buffer))
