"""The one weight table of a model: global Megatron name -> Row. Loader, exporter, converter and sync read it.

Global means: layers and experts are numbered over the whole model, whatever part of it a rank holds. Names are those
of Megatron's local layer specs; `mrl.models.naming` translates the transformer-engine ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from mrl.models.arch import ModelArch
from mrl.weights.families import LAYER_ROWS
from mrl.weights.families.blocks import norm
from mrl.weights.kinds import Row

Role = Literal["policy", "critic"]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
VALUE_HEAD = "value_head.weight"

HF_EMBEDDING = "model.embed_tokens.weight"
HF_OUTPUT = "lm_head.weight"
HF_VALUE_HEAD = "score.weight"


@lru_cache(maxsize=16)
def weight_table(arch: ModelArch, role: Role = "policy") -> Mapping[str, Row]:
    """Rows in the order of the forward pass.

    A policy with tied embeddings has a row for the output layer too: with pipeline parallelism the last stage holds a
    copy of the embedding under that name. A critic has a value head (1, h) in place of the output layer and is never
    tied.
    """
    wide = ((arch.vocab_size, arch.hidden_size),)
    rows = {EMBEDDING: Row("vocab", (HF_EMBEDDING,), wide, tp_dim=0)}
    for index in range(arch.num_layers):
        rows.update(LAYER_ROWS[arch.family](arch, index))
    rows["decoder.final_layernorm.weight"] = norm("model.norm.weight", arch.hidden_size)
    if role == "critic":
        rows[VALUE_HEAD] = Row("copy", (HF_VALUE_HEAD,), ((1, arch.hidden_size),), optional=True)
    elif arch.tied_embeddings:
        rows[OUTPUT] = Row("vocab", (HF_EMBEDDING,), wide, tp_dim=0, copy_of=EMBEDDING)
    else:
        rows[OUTPUT] = Row("vocab", (HF_OUTPUT,), wide, tp_dim=0)
    return MappingProxyType(rows)
