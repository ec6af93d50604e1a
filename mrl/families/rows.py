"""Rows of a weight table, including those that families share. No tensors: `mrl.weights.parameter_layout` moves them.

`m` and `h` are the Megatron and the Hugging Face prefix of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from mrl.families.arch import ModelArch

# mapping between the two sides: see mrl.weights.parameter_layout
MappingKind = Literal["copy", "vocab", "qkv", "gate_up", "interleaved", "transposed"]
InitialValues = Literal["normal", "norm", "ones", "zeros", "decays"]
BODY = "model."  # the hub's prefix of a decoder's tensors


@dataclass(frozen=True)
class TensorAlias:
    """Other on-disk form of a tensor: a block of the tensor `name`.

    `ranges` gives (start, stop) for each dimension of `shape`; a leading dimension that the wanted tensor does not
    have is an expert number, one wide.
    """

    name: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ParameterMapping:
    """One Megatron parameter (unsharded) and the Hugging Face tensors that form it.

    hf: their names, `NAME[INDEX]` for a slice of one (mrl.families.stacks); shapes: in that order
    pieces: numbers of rows of the parts of kind `qkv` or `gate_up`, if the hub concatenates them in one tensor, or some
    groups: of kind `qkv`, into which the rows of each part fall; 0: the model's key-value heads
    tp_dim: the dimension that tensor parallelism cuts; None: replicated
    expert: the parameter belongs to one expert (expert parallel, cut by expert tensor parallelism)
    start: initial values when training from scratch; `norm`: those of a norm that changes no scale
    frozen: never trained, and float32 whatever the model's dtype, in every file and engine
    copy_of: a second copy of another parameter: written on load, never exported
    optional: the checkpoint may lack it; the parameter then stays as built
    aliases: other on-disk forms, one a tensor of `hf`, or none
    joined: SGLang's name of the parameter that contains it, whole, with others of that name; they are loaded together
    only zeros: names and shapes of all-zero tensors that other programs read beside it
    """

    kind: MappingKind
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    pieces: tuple[int, ...] = ()
    groups: int = 0
    tp_dim: int | None = None
    expert: bool = False
    start: InitialValues = "normal"
    frozen: bool = False
    copy_of: str | None = None
    optional: bool = False
    aliases: tuple[TensorAlias, ...] = ()
    joined: str | None = None
    zeros: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def in_one(self, name: str) -> ParameterMapping:
        """Returns the row of a hub that concatenates these tensors in one, called `name`."""
        rows = tuple(shape[0] for shape in self.shapes)
        return replace(self, hf=(name,), shapes=((sum(rows), *self.shapes[0][1:]),), pieces=rows)

    def pieces_of(self, index: int) -> tuple[int, ...]:
        """Returns the pieces in tensor number `index`; the pieces fill the tensors one after the other."""
        stop = sum(shape[0] for shape in self.shapes[: index + 1])
        start, ends = stop - self.shapes[index][0], accumulate(self.pieces)
        return tuple(rows for rows, end in zip(self.pieces, ends, strict=True) if start < end <= stop)

    def below(self, body: str) -> ParameterMapping:
        """Returns the row of a decoder whose hub tensors have the prefix `body`."""
        names = tuple(body + name.removeprefix(BODY) if name.startswith(BODY) else name for name in self.hf)
        return replace(self, hf=names)


MappingTable = dict[str, ParameterMapping]


def prefixes(layer: int) -> tuple[str, str]:
    """Returns the (Megatron, hub) prefixes of a layer, counted from 0."""
    return f"decoder.layers.{layer}.", f"model.layers.{layer}."


def norm(name: str, size: int) -> ParameterMapping:
    """Returns the row of an RMSNorm's weight [size] with the hub name `name`."""
    return ParameterMapping("copy", (name,), ((size,),), start="norm")


def attention(arch: ModelArch, m: str, h: str) -> MappingTable:
    """Returns the rows of a layer's projections and of both its norms, with the model's biases and q/k norms."""
    width, kv_width, hidden = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim, arch.hidden_size
    rows = {
        m + "input_layernorm.weight": norm(h + "input_layernorm.weight", hidden),
        m + "self_attention.linear_qkv.weight": ParameterMapping(
            "qkv",
            tuple(f"{h}self_attn.{x}_proj.weight" for x in "qkv"),
            ((width, hidden), (kv_width, hidden), (kv_width, hidden)),
            tp_dim=0,
        ),
        m + "self_attention.linear_proj.weight": ParameterMapping(
            "copy", (h + "self_attn.o_proj.weight",), ((hidden, width),), tp_dim=1
        ),
        m + "pre_mlp_layernorm.weight": norm(h + "post_attention_layernorm.weight", hidden),
    }
    if arch.qkv_bias:
        names = tuple(f"{h}self_attn.{x}_proj.bias" for x in "qkv")
        shapes = (width,), (kv_width,), (kv_width,)
        rows[m + "self_attention.linear_qkv.bias"] = ParameterMapping("qkv", names, shapes, tp_dim=0, start="zeros")
    if arch.qk_norm:
        for x in "qk":
            name = f"{m}self_attention.{x}_layernorm.weight"
            rows[name] = norm(f"{h}self_attn.{x}_norm.weight", arch.head_dim)
    return rows


def latent_attention(arch: ModelArch, m: str, h: str) -> MappingTable:
    """Returns the rows of a layer with multi-head latent attention, and of both its norms."""
    assert arch.latent is not None
    latent, hidden, heads = arch.latent, arch.hidden_size, arch.num_heads
    fused = f"{h}self_attn.fused_qkv_a_proj_with_mqa.weight" if latent.query_rank else None

    def linear(
        own: str, theirs: str, rows: int, columns: int, tp_dim: int = 0, joined: str | None = None
    ) -> MappingTable:
        name, hf = f"{m}self_attention.{own}.weight", f"{h}self_attn.{theirs}.weight"
        return {name: ParameterMapping("copy", (hf,), ((rows, columns),), tp_dim=tp_dim, joined=joined)}

    def own_norm(own: str, theirs: str, size: int) -> MappingTable:
        return {f"{m}self_attention.{own}.weight": norm(f"{h}self_attn.{theirs}.weight", size)}

    rows = {m + "input_layernorm.weight": norm(h + "input_layernorm.weight", hidden)}
    width = heads * arch.head_dim
    if latent.query_rank is None:
        rows |= linear("linear_q_proj", "q_proj", width, hidden)
    else:
        rows |= linear("linear_q_down_proj", "q_a_proj", latent.query_rank, hidden, joined=fused)
        rows |= own_norm("q_layernorm", "q_a_layernorm", latent.query_rank)
        rows |= linear("linear_q_up_proj", "q_b_proj", width, latent.query_rank)
    down, up = "kv_a_proj_with_mqa", heads * (latent.plain + latent.value)
    whole = fused or f"{h}self_attn.{down}.weight"
    rows |= linear("linear_kv_down_proj", down, latent.rank + latent.turned, hidden, joined=whole)
    rows |= own_norm("kv_layernorm", "kv_a_layernorm", latent.rank)
    rows |= linear("linear_kv_up_proj", "kv_b_proj", up, latent.rank)
    rows |= linear("linear_proj", "o_proj", hidden, heads * latent.value, tp_dim=1)
    return rows | {m + "pre_mlp_layernorm.weight": norm(h + "post_attention_layernorm.weight", hidden)}


def delta_net(
    arch: ModelArch, m: str, h: str, projections: tuple[tuple[str, int], ...], *, by_head: bool
) -> MappingTable:
    """Returns the rows of a layer with a gated delta net, and of both its norms.

    projections: the hub's names of the input projections, and the number of parts of `DeltaNetArch.rows` in each
    by_head: each of them has its parts key head by key head, as Megatron's joined one; otherwise part by part
    """
    assert arch.delta is not None
    delta, hidden, own, theirs = arch.delta, arch.hidden_size, m + "self_attention.", h + "linear_attn."
    parts, ends = delta.rows, list(accumulate(count for _, count in projections))
    sizes = [sum(parts[end - count : end]) for end, (_, count) in zip(ends, projections, strict=True)]
    groups, width, values = delta.key_heads, sum(parts[:3]), delta.value_heads

    def by_value_head(name: str, start: InitialValues) -> ParameterMapping:
        return ParameterMapping("copy", (theirs + name,), ((values,),), tp_dim=0, start=start)

    return {
        m + "input_layernorm.weight": norm(h + "input_layernorm.weight", hidden),
        own + "dt_bias": by_value_head("dt_bias", "ones"),
        own + "A_log": by_value_head("A_log", "decays"),
        own + "in_proj.weight": ParameterMapping(
            "qkv",
            tuple(f"{theirs}{name}.weight" for name, _ in projections),
            tuple((size, hidden) for size in sizes),
            pieces=() if by_head else parts,
            groups=groups,
            tp_dim=0,
        ),
        own + "conv1d.weight": ParameterMapping(
            "qkv",
            (theirs + "conv1d.weight",),
            ((width, 1, delta.kernel),),
            pieces=parts[:3],
            groups=groups,
            tp_dim=0,
        ),
        own + "out_norm.weight": ParameterMapping("copy", (theirs + "norm.weight",), ((delta.value,),), start="ones"),
        own + "out_proj.weight": ParameterMapping(
            "copy", (theirs + "out_proj.weight",), ((hidden, values * delta.value),), tp_dim=1
        ),
        m + "pre_mlp_layernorm.weight": norm(h + "post_attention_layernorm.weight", hidden),
    }


def dense_mlp(hidden: int, ffn: int, m: str, h: str, names: tuple[str, str] = ("mlp", "mlp")) -> MappingTable:
    """Returns the rows of a gated MLP [hidden -> ffn -> hidden]. names: of the module, Megatron's and the hub's."""
    own, theirs = f"{m}{names[0]}.", f"{h}{names[1]}."
    return {
        own + "linear_fc1.weight": ParameterMapping(
            "gate_up",
            (theirs + "gate_proj.weight", theirs + "up_proj.weight"),
            ((ffn, hidden), (ffn, hidden)),
            tp_dim=0,
        ),
        own + "linear_fc2.weight": ParameterMapping("copy", (theirs + "down_proj.weight",), ((hidden, ffn),), tp_dim=1),
    }


def router_bias(count: int, m: str, hf: str) -> MappingTable:
    """Returns the row of the bias that is added to the experts' scores for their selection only."""
    return {m + "mlp.router.expert_bias": ParameterMapping("copy", (hf,), ((count,),), start="zeros", frozen=True)}


def expert_mlps(
    hidden: int, ffn: int, count: int, m: str, h: str, *, router: str, names: tuple[str, str, str]
) -> MappingTable:
    """Returns the rows of a router and of `count` gated MLPs [hidden -> ffn -> hidden].

    `router` and `names` (gate, up, down; {} is the expert's number) are the hub's, relative to the layer.

    Checkpoints saved in transformers' own memory layout hold all experts of a layer in two tensors instead; both forms
    are read, the hub's is written.
    """
    fused_in, fused_out = (count, 2 * ffn, hidden), (count, hidden, ffn)
    rows = {
        m + "mlp.router.weight": ParameterMapping(
            "copy",
            (h + router,),
            ((count, hidden),),
            aliases=(TensorAlias(h + "mlp.gate.weight", (count, hidden), ((0, count), (0, hidden))),),
        )
    }
    for i in range(count):
        gate, up, down = (h + name.format(i) for name in names)
        at = (i, i + 1)
        rows[f"{m}mlp.experts.local_experts.{i}.linear_fc1.weight"] = ParameterMapping(
            "gate_up",
            (gate, up),
            ((ffn, hidden), (ffn, hidden)),
            tp_dim=0,
            expert=True,
            aliases=(
                TensorAlias(h + "mlp.experts.gate_up_proj", fused_in, (at, (0, ffn), (0, hidden))),
                TensorAlias(h + "mlp.experts.gate_up_proj", fused_in, (at, (ffn, 2 * ffn), (0, hidden))),
            ),
        )
        rows[f"{m}mlp.experts.local_experts.{i}.linear_fc2.weight"] = ParameterMapping(
            "copy",
            (down,),
            ((hidden, ffn),),
            tp_dim=1,
            expert=True,
            aliases=(TensorAlias(h + "mlp.experts.down_proj", fused_out, (at, (0, hidden), (0, ffn))),),
        )
    return rows
