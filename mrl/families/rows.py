"""A row of a weight table, and the rows that the families share. No tensors: `mrl.weights.kinds` moves them.

`m` and `h` are the Megatron and the Hugging Face prefix of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrl.families.arch import ModelArch

Kind = Literal["copy", "vocab", "qkv", "gate_up"]  # how the two sides correspond: see mrl.weights.kinds
Start = Literal["normal", "ones", "zeros"]


@dataclass(frozen=True)
class Alias:
    """Another on-disk form of a tensor: a block of the tensor `name`.

    `ranges` gives (start, stop) for each dimension of `shape`; a leading dimension that the wanted tensor does not
    have is an expert number, one wide.
    """

    name: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Row:
    """One Megatron parameter (unsharded) and the Hugging Face tensors that it is made of.

    shapes: of the Hugging Face tensors, in the order of `hf`
    tp_dim: the dimension that tensor parallelism cuts; None: replicated
    expert: the parameter belongs to one expert (expert parallel, cut by expert tensor parallelism)
    start: the values that training from scratch starts with
    copy_of: a second copy of another parameter: written on load, never exported
    optional: the checkpoint may lack it; the parameter then stays as built
    aliases: other on-disk forms, one a tensor of `hf`, or none
    """

    kind: Kind
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tp_dim: int | None = None
    expert: bool = False
    start: Start = "normal"
    copy_of: str | None = None
    optional: bool = False
    aliases: tuple[Alias, ...] = ()


Table = dict[str, Row]


def prefixes(layer: int) -> tuple[str, str]:
    """(Megatron's, the hub's) of a layer, counted from 0."""
    return f"decoder.layers.{layer}.", f"model.layers.{layer}."


def norm(name: str, size: int) -> Row:
    """The weight [size] of an RMSNorm, which the hub calls `name`."""
    return Row("copy", (name,), ((size,),), start="ones")


def attention(arch: ModelArch, m: str, h: str) -> Table:
    """Rows of a layer's projections and of both its norms, with the biases and q/k norms that the model has."""
    width, kv_width, hidden = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim, arch.hidden_size
    rows = {
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
    if arch.qkv_bias:
        names = tuple(f"{h}self_attn.{x}_proj.bias" for x in "qkv")
        shapes = (width,), (kv_width,), (kv_width,)
        rows[m + "self_attention.linear_qkv.bias"] = Row("qkv", names, shapes, tp_dim=0, start="zeros")
    if arch.qk_norm:
        for x in "qk":
            name = f"{m}self_attention.{x}_layernorm.weight"
            rows[name] = norm(f"{h}self_attn.{x}_norm.weight", arch.head_dim)
    return rows


def dense_mlp(hidden: int, ffn: int, m: str, h: str) -> Table:
    """Rows of a gated MLP [hidden -> ffn -> hidden]."""
    return {
        m + "mlp.linear_fc1.weight": Row(
            "gate_up",
            (h + "mlp.gate_proj.weight", h + "mlp.up_proj.weight"),
            ((ffn, hidden), (ffn, hidden)),
            tp_dim=0,
        ),
        m + "mlp.linear_fc2.weight": Row("copy", (h + "mlp.down_proj.weight",), ((hidden, ffn),), tp_dim=1),
    }


def expert_mlps(
    hidden: int, ffn: int, count: int, m: str, h: str, *, router: str, names: tuple[str, str, str]
) -> Table:
    """Rows of a router and of `count` gated MLPs [hidden -> ffn -> hidden].

    `router` and `names` (gate, up, down; {} is the expert's number) are the hub's, relative to the layer.

    Checkpoints that were saved in transformers' own memory layout hold all experts of a layer in two tensors instead;
    both forms are read, the hub's is written.
    """
    fused_in, fused_out = (count, 2 * ffn, hidden), (count, hidden, ffn)
    rows = {
        m + "mlp.router.weight": Row(
            "copy",
            (h + router,),
            ((count, hidden),),
            aliases=(Alias(h + "mlp.gate.weight", (count, hidden), ((0, count), (0, hidden))),),
        )
    }
    for i in range(count):
        gate, up, down = (h + name.format(i) for name in names)
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
