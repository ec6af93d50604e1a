"""What a model is, read from a Hugging Face config.json. Everything else in mrl reads this, never the JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mrl.foreign import check_links, read_json
from mrl.models.config_keys import FLOAT32_MAX, FLOAT32_TINY, Keys, UnsupportedModel, short

__all__ = [
    "ModelArch",
    "UnsupportedModel",
    "architecture_of",
    "is_reward_model",
    "load_arch",
    "read_hf_config",
]

Family = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
MOE: tuple[Family, ...] = ("mixtral", "qwen3_moe")
ROPE_TYPES = {  # with the numbers that each needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
MAX_WIDTH, MAX_VOCAB, MAX_LAYERS, MAX_HEADS = 1 << 20, 1 << 24, 4096, 1 << 14  # beyond these a number is a mistake
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


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """config.json of a model directory. Raises UnsupportedModel if it is no JSON object, or if files of the directory
    are links out of it: what follows reads them (tokenizer, weights, templates)."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: model.path must be a Hugging Face model directory")
    try:
        check_links(Path(path))
        config = read_json(file)
    except ValueError as error:
        raise UnsupportedModel(str(error)) from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{file} holds a {type(config).__name__}, not an object with keys")
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


def architecture_of(config: dict[str, Any], where: str = "config.json") -> str:
    """The first name under `architectures`."""
    names = config.get("architectures") or ["(none)"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedModel(f"{where}: architectures must be a list of names, not {str(names)[:60]!r}")
    return str(names[0])


def arch_from_dict(c: dict[str, Any], where: str) -> ModelArch:
    """Raises UnsupportedModel, naming the key: see `load_arch`; and for values of a wrong kind, zero or absurd."""
    name = architecture_of(c, where)
    family = ARCHITECTURES.get(name.replace(VALUE_HEAD_SUFFIX, "ForCausalLM"))
    if family is None:
        raise UnsupportedModel(
            f"{where}: architecture {name[:80]} has no weight table; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    keys = Keys(c, where)
    _refuse_what_differs(c, family, where)
    _refuse_rope(keys)
    vocabulary, hidden = keys.size("vocab_size", MAX_VOCAB), keys.size("hidden_size", MAX_WIDTH)
    heads = keys.size("num_attention_heads", MAX_HEADS)
    experts = _experts(keys, family)
    return ModelArch(
        family=family,
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_layers=keys.size("num_hidden_layers", MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=_kv_heads(keys, heads),
        head_dim=_head_dim(keys, family, hidden, heads),
        ffn_size=keys.size("moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size", MAX_WIDTH),
        norm_eps=keys.number("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6, FLOAT32_TINY, 1.0),
        tied_embeddings=keys.flag("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        max_positions=keys.size("max_position_embeddings", 1 << 30, 2048),
        initializer_range=keys.number("initializer_range", 0.02, 0.0, 1e3),
        eos_token_ids=keys.token_ids("eos_token_id", vocabulary),
        num_experts=experts[0] if experts else None,
        experts_per_token=experts[1] if experts else None,
        normalize_topk=keys.flag("norm_topk_prob", False) if family == "qwen3_moe" else True,
    )


def _kv_heads(keys: Keys, heads: int) -> int:
    found = keys.size("num_key_value_heads", MAX_HEADS, heads)
    if heads % found:
        raise keys.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    return found


def _head_dim(keys: Keys, family: Family, hidden: int, heads: int) -> int:
    if keys["head_dim"] is None and not family.startswith("qwen3") and hidden % heads:
        raise keys.wrong("hidden_size", f"a multiple of num_attention_heads ({heads}) where head_dim is not given")
    found = keys.size("head_dim", MAX_WIDTH, 128 if family.startswith("qwen3") else hidden // heads)
    if found % 2:
        raise UnsupportedModel(f"{keys.where}: a head has {found} channels; rotary embeddings turn pairs of them")
    return found


def _experts(keys: Keys, family: Family) -> tuple[int, int] | None:
    """(experts, experts per token) of a MoE model."""
    if family not in MOE:
        return None
    is_local = family == "mixtral" or keys["num_local_experts"] is not None
    name = "num_local_experts" if is_local else "num_experts"
    experts = keys.size(name, 1 << 16)
    chosen = keys.size("num_experts_per_tok", experts)
    if chosen == 1 and (family == "mixtral" or keys["norm_topk_prob"]):
        raise keys.wrong("num_experts_per_tok", "2 or more: with normalised router weights every weight would be 1")
    return experts, chosen


def _refuse_rope(keys: Keys) -> None:
    """What `rope.inverse_frequencies` cannot give, found before a process starts."""
    _refuse_partial(keys)
    for name in ("rope_parameters", "rope_scaling"):
        rope = keys.table(name)
        if rope is None:
            continue
        kind = rope["rope_type"] or rope["type"] or "default"
        if not isinstance(kind, str) or kind not in ROPE_TYPES:
            raise UnsupportedModel(
                f"{keys.where}: {name}.rope_type={str(kind)[:60]}; supported: {', '.join(ROPE_TYPES)}"
            )
        _refuse_partial(rope)
        rope.number("original_max_position_embeddings", 1.0, FLOAT32_TINY, FLOAT32_MAX)
        for needed in ROPE_TYPES[kind]:
            rope.number(needed, None, FLOAT32_TINY, FLOAT32_MAX)


def _refuse_partial(keys: Keys) -> None:
    keys.number("rope_theta", 10000.0, 1.0, FLOAT32_MAX)
    if keys["partial_rotary_factor"] not in (None, 1):
        found = short(keys["partial_rotary_factor"])
        raise UnsupportedModel(f"{keys.where}: partial_rotary_factor={found}; supported: 1")


def _refuse_what_differs(c: dict[str, Any], family: Family, where: str) -> None:
    """Keys under which a plain decoder would silently compute something else than transformers does."""
    wrong: list[str] = []
    if c.get("model_type") != family:
        wrong.append(f"model_type={short(c.get('model_type'))} (architectures say {family})")
    if c.get("hidden_act", "silu") != "silu":
        wrong.append(f"hidden_act={short(c['hidden_act'])} (only silu)")
    if c.get("attention_dropout"):
        wrong.append(f"attention_dropout={short(c['attention_dropout'])} (only 0)")
    if family in ("llama", "qwen3", "qwen3_moe") and c.get("attention_bias"):
        wrong.append("attention_bias=true (its o_proj bias has no place)")
    if c.get("mlp_bias"):
        wrong.append("mlp_bias=true")
    keys = Keys(c, where)
    if family in ("mistral", "mixtral") and c.get("sliding_window") is not None:
        window = keys.size("sliding_window", 1 << 30)
        if window < keys.size("max_position_embeddings", 1 << 30, 2048):
            wrong.append(f"sliding_window={window} below max_position_embeddings")
    if c.get("use_sliding_window"):
        wrong.append("use_sliding_window=true")
    if family == "qwen3_moe" and (c.get("mlp_only_layers") or c.get("decoder_sparse_step", 1) != 1):
        wrong.append("dense layers between the expert layers (mlp_only_layers, decoder_sparse_step)")
    if c.get("quantization_config"):
        wrong.append("quantization_config (train from unquantized weights)")
    if c.get("auto_map"):
        wrong.append("auto_map (code of the model's own, which is never run)")
    if wrong:
        raise UnsupportedModel(f"{where}: not supported for {family}: " + "; ".join(wrong))
