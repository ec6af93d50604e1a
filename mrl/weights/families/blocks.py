"""The pieces that the families share. `m` and `h` are the Megatron and the Hugging Face prefix of a layer."""

from __future__ import annotations

from collections.abc import Callable

from mrl.models.arch import ModelArch
from mrl.weights.kinds import Alias, Row

Rows = dict[str, Row]


def prefixes(layer: int) -> tuple[str, str]:
    return f"decoder.layers.{layer}.", f"model.layers.{layer}."


def norm(name: str, size: int) -> Row:
    return Row("copy", (name,), ((size,),))


def attention(arch: ModelArch, m: str, h: str) -> Rows:
    """Projections and both norms of the layer, without biases and q/k norms."""
    width, kv_width, hidden = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim, arch.hidden_size
    return {
        m + "input_layernorm.weight": norm(h + "input_layernorm.weight", hidden),
        m + "self_attention.linear_qkv.weight": Row(
            "qkv",
            tuple(f"{h}self_attn.{x}_proj.weight" for x in "qkv"),
            ((width, hidden), (kv_width, hidden), (kv_width, hidden)),
            tp_dim=0,
        ),
        m + "self_attention.linear_proj.weight": Row(
            "copy", (h + "self_attn.o_proj.weight",), ((hidden, width),), tp_dim=1
        ),
        m + "pre_mlp_layernorm.weight": norm(h + "post_attention_layernorm.weight", hidden),
    }


def qkv_bias(arch: ModelArch, m: str, h: str) -> Rows:
    width, kv_width = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    names = tuple(f"{h}self_attn.{x}_proj.bias" for x in "qkv")
    return {m + "self_attention.linear_qkv.bias": Row("qkv", names, ((width,), (kv_width,), (kv_width,)), tp_dim=0)}


def qk_norm(arch: ModelArch, m: str, h: str) -> Rows:
    return {
        f"{m}self_attention.{x}_layernorm.weight": norm(f"{h}self_attn.{x}_norm.weight", arch.head_dim) for x in "qk"
    }


def dense_mlp(arch: ModelArch, m: str, h: str) -> Rows:
    ffn, hidden = arch.ffn_size, arch.hidden_size
    return {
        m + "mlp.linear_fc1.weight": Row(
            "gate_up",
            (h + "mlp.gate_proj.weight", h + "mlp.up_proj.weight"),
            ((ffn, hidden), (ffn, hidden)),
            tp_dim=0,
        ),
        m + "mlp.linear_fc2.weight": Row("copy", (h + "mlp.down_proj.weight",), ((hidden, ffn),), tp_dim=1),
    }


def moe(arch: ModelArch, m: str, h: str, router: str, expert_names: Callable[[int], tuple[str, str, str]]) -> Rows:
    """`router` and `expert_names(i)` -> (gate, up, down) are the hub's names, relative to the layer.

    Checkpoints that were saved in transformers' own memory layout hold all experts of a layer in two tensors instead;
    both forms are read, the hub's is written.
    """
    assert arch.num_experts is not None
    hidden, ffn, num = arch.hidden_size, arch.ffn_size, arch.num_experts
    fused_in, fused_out = (num, 2 * ffn, hidden), (num, hidden, ffn)
    rows = {
        m + "mlp.router.weight": Row(
            "copy",
            (h + router,),
            ((num, hidden),),
            aliases=(Alias(h + "mlp.gate.weight", (num, hidden), ((0, num), (0, hidden))),),
        )
    }
    for i in range(num):
        gate, up, down = (h + name for name in expert_names(i))
        at = (i, i + 1)
        rows[f"{m}mlp.experts.local_experts.{i}.linear_fc1.weight"] = Row(
            "gate_up",
            (gate, up),
            ((ffn, hidden), (ffn, hidden)),
            tp_dim=0,
            expert=True,
            aliases=(
                Alias(h + "mlp.experts.gate_up_proj", fused_in, (at, (0, ffn), (0, hidden))),
                Alias(h + "mlp.experts.gate_up_proj", fused_in, (at, (ffn, 2 * ffn), (0, hidden))),
            ),
        )
        rows[f"{m}mlp.experts.local_experts.{i}.linear_fc2.weight"] = Row(
            "copy",
            (down,),
            ((hidden, ffn),),
            tp_dim=1,
            expert=True,
            aliases=(Alias(h + "mlp.experts.down_proj", fused_out, (at, (0, hidden), (0, ffn))),),
        )
    return rows
