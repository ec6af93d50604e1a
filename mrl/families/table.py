"""The one weight table of a model: global Megatron name -> Row. Initialisation, loader, exporter, converter, sync and
engines read it.

Global means: layers and experts are numbered over the whole model, whatever part of it a rank holds. Names are those
of Megatron's local layer specs; `mrl.models.naming` translates the transformer-engine ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from mrl.families import FAMILIES, ModelArch
from mrl.families.rows import Row, norm

Role = Literal["policy", "critic"]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
VALUE_HEAD = "value_head.weight"

HF_EMBEDDING = "model.embed_tokens.weight"
HF_OUTPUT = "lm_head.weight"
HF_VALUE_HEAD = "score.weight"

VOCAB_ALIGN = 8
VOCAB_ALIGN_GPU = 128  # whole tiles of tensor cores; checkpoints are the same, which leave the padding out


@lru_cache(maxsize=16)
def weight_table(arch: ModelArch, role: Role = "policy") -> Mapping[str, Row]:
    """Rows in the order of the forward pass.

    A policy with tied embeddings has a row for the output layer too: with pipeline parallelism the last stage holds a
    copy of the embedding under that name. A critic has a value head (1, h) in place of the output layer and is never
    tied.
    """
    wide, family = ((arch.vocab_size, arch.hidden_size),), FAMILIES[arch.family]
    rows = {EMBEDDING: Row("vocab", (HF_EMBEDDING,), wide, tp_dim=0)}
    for index in range(arch.num_layers):
        rows.update(family.layer_rows(arch, index))
    rows["decoder.final_layernorm.weight"] = norm("model.norm.weight", arch.hidden_size)
    if role == "critic":
        head = Row("copy", (HF_VALUE_HEAD,), ((1, arch.hidden_size),), start="zeros", optional=True)
        rows[VALUE_HEAD] = head
    elif arch.tied_embeddings:
        rows[OUTPUT] = Row("vocab", (HF_EMBEDDING,), wide, tp_dim=0, copy_of=EMBEDDING)
    else:
        rows[OUTPUT] = Row("vocab", (HF_OUTPUT,), wide, tp_dim=0)
    return MappingProxyType(rows)


def padded_vocab_size(arch: ModelArch, tp: int, align: int = VOCAB_ALIGN) -> int:
    """Rows of the embedding over all tensor-parallel ranks, each of which holds a multiple of `align`."""
    unit = align * tp
    return -(-arch.vocab_size // unit) * unit
