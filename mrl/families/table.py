"""Weight table of a model: global Megatron name -> Row, used by initialisation, loader, exporter, converter, weight
sync and engines.

Global means that layers and experts are numbered over the whole model, whatever part of it a rank holds. Names are
those of Megatron's local layer specs; `mrl.models.naming` translates the transformer-engine ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from mrl.families import FAMILIES, ModelArch
from mrl.families.rows import BODY, ParameterMapping, norm

Role = Literal["policy", "critic"]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
VALUE_HEAD = "value_head.weight"

HF_EMBEDDING = "model.embed_tokens.weight"
HF_OUTPUT = "lm_head.weight"
HF_VALUE_HEAD = "score.weight"
HF_VALUE_BIAS = "score.bias"  # always zero: written for programs that would otherwise initialise one randomly

SINK_CHANNELS = 8  # extra channels of attention with sinks: one would suffice, but kernels need a multiple of 8
DELTA_CHUNK = 64  # tokens of a sequence that gated delta nets take at once
VOCAB_ALIGN = 8
VOCAB_ALIGN_GPU = 128  # whole tensor-core tiles; checkpoints leave the padding out


@lru_cache(maxsize=16)
def weight_table(arch: ModelArch, role: Role = "policy") -> Mapping[str, ParameterMapping]:
    """Returns the rows in the order of the forward pass.

    A policy with tied embeddings has a row for the output layer too: with pipeline parallelism the last stage holds a
    copy of the embedding under that name. A critic has a value head (score_heads, h) in place of the output layer and
    is never tied.
    """
    wide, family = ((arch.vocab_size, arch.hidden_size),), FAMILIES[arch.family]
    rows = {EMBEDDING: ParameterMapping("vocab", (HF_EMBEDDING,), wide, tp_dim=0)}
    for index in range(arch.num_layers):
        rows.update(family.layer_rows(arch, index))
    rows["decoder.final_layernorm.weight"] = norm("model.norm.weight", arch.hidden_size)
    if role == "critic":
        rows[VALUE_HEAD] = ParameterMapping(
            "copy",
            (HF_VALUE_HEAD,),
            ((arch.score_heads, arch.hidden_size),),
            start="zeros",
            optional=True,
            zeros=((HF_VALUE_BIAS, (arch.score_heads,)),) if family.engine_score_bias or arch.scores_steps else (),
        )
    elif arch.tied_embeddings:
        rows[OUTPUT] = ParameterMapping("vocab", (HF_EMBEDDING,), wide, tp_dim=0, copy_of=EMBEDDING)
    else:
        rows[OUTPUT] = ParameterMapping("vocab", (HF_OUTPUT,), wide, tp_dim=0)
    if family.shifted_norms:
        rows = {name: replace(row, start="zeros") if row.start == "norm" else row for name, row in rows.items()}
    if family.body != BODY:
        rows = {name: row.below(family.body) for name, row in rows.items()}
    return MappingProxyType({**family.tower_rows(arch.vision), **rows} if arch.vision is not None else rows)


def padded_vocab_size(arch: ModelArch, tp: int, align: int = VOCAB_ALIGN) -> int:
    """Returns the embedding's rows over all tensor-parallel ranks, each of which holds a multiple of `align`."""
    unit = align * tp
    return -(-arch.vocab_size // unit) * unit
