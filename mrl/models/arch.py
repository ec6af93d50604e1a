"""What a model is, read from a Hugging Face config.json. Everything else in mrl reads this, never the JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
VALUE_HEAD_SUFFIX = "ForSequenceClassification"  # the same decoder with a score head: a critic or reward model


@dataclass(frozen=True)
class ModelArch:
    """The shape of a decoder-only model. `ffn_size` is an expert's width in MoE models."""

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int
    initializer_range: float
    eos_token_ids: tuple[int, ...]
    num_experts: int | None = None
    experts_per_token: int | None = None
    normalize_topk: bool = True


class UnsupportedModel(ValueError):
    """The config describes something that mrl would compute wrongly; the message names the key."""


def read_hf_config(path: str | Path) -> dict[str, Any]:
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: model.path must be a Hugging Face model directory")
    config: dict[str, Any] = json.loads(file.read_text())
    return config


def load_arch(path: str | Path) -> ModelArch:
    """ModelArch of a Hugging Face directory.

    Raises UnsupportedModel for an architecture without a weight table and for any key that would make our forward
    differ from transformers' (sliding windows, attention dropout, projection biases, other activations).
    """
    return arch_from_dict(read_hf_config(path), where=f"{path}/config.json")


def is_reward_model(path: str | Path) -> bool:
    """Whether a Hugging Face directory says of itself that it has a score head in place of an output layer."""
    return architecture_of(read_hf_config(path)).endswith(VALUE_HEAD_SUFFIX)


def architecture_of(config: dict[str, Any]) -> str:
    """The first name under `architectures`."""
    return (config.get("architectures") or ["(none)"])[0]


def arch_from_dict(c: dict[str, Any], where: str) -> ModelArch:
    name = architecture_of(c)
    family = ARCHITECTURES.get(name.replace(VALUE_HEAD_SUFFIX, "ForCausalLM"))
    if family is None:
        raise UnsupportedModel(
            f"{where}: architecture {name} has no weight table; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    _refuse_what_differs(c, family, where)
    moe = family in ("mixtral", "qwen3_moe")
    heads = c["num_attention_heads"]
    eos = c.get("eos_token_id")
    return ModelArch(
        family=family,
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        num_layers=c["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=c.get("head_dim") or (128 if family.startswith("qwen3") else c["hidden_size"] // heads),
        ffn_size=c["moe_intermediate_size"] if family == "qwen3_moe" else c["intermediate_size"],
        norm_eps=c.get("rms_norm_eps", 1e-5 if family in ("mixtral",) else 1e-6),
        tied_embeddings=bool(c.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        max_positions=c.get("max_position_embeddings", 2048),
        initializer_range=c.get("initializer_range", 0.02),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        num_experts=(c.get("num_local_experts") or c.get("num_experts")) if moe else None,
        experts_per_token=c.get("num_experts_per_tok") if moe else None,
        normalize_topk=bool(c.get("norm_topk_prob", False)) if family == "qwen3_moe" else True,
    )


def _refuse_what_differs(c: dict[str, Any], family: Family, where: str) -> None:
    """Keys under which a plain decoder would silently compute something else than transformers does."""
    wrong: list[str] = []
    if c.get("hidden_act", "silu") != "silu":
        wrong.append(f"hidden_act={c['hidden_act']} (only silu)")
    if c.get("attention_dropout"):
        wrong.append(f"attention_dropout={c['attention_dropout']} (only 0)")
    if family in ("llama", "qwen3", "qwen3_moe") and c.get("attention_bias"):
        wrong.append("attention_bias=true (its o_proj bias has no place)")
    if c.get("mlp_bias"):
        wrong.append("mlp_bias=true")
    window = c.get("sliding_window")
    if window and family in ("mistral", "mixtral") and window < c.get("max_position_embeddings", 0):
        wrong.append(f"sliding_window={window} below max_position_embeddings")
    if c.get("use_sliding_window"):
        wrong.append("use_sliding_window=true")
    if family == "qwen3_moe" and (c.get("mlp_only_layers") or c.get("decoder_sparse_step", 1) != 1):
        wrong.append("dense layers between the expert layers (mlp_only_layers, decoder_sparse_step)")
    if c.get("quantization_config"):
        wrong.append("quantization_config (train from unquantized weights)")
    if wrong:
        raise UnsupportedModel(f"{where}: not supported for {family}: " + "; ".join(wrong))
