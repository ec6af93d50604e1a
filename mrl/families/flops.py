"""How many weights a model has, and how many floating-point operations its passes take. Arithmetic on the weight table,
for what a run prints and for what is predicted of one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from mrl.families.arch import ModelArch
from mrl.families.table import EMBEDDING, OUTPUT, VALUE_HEAD, Role, padded_vocab_size, weight_table

BACKWARD = 2  # times a forward pass: gradients of the inputs, gradients of the weights


def num_parameters(arch: ModelArch, role: Role = "policy", tp: int | None = None) -> int:
    """Weights of the whole model, a tied embedding once; with `tp` also the rows that pad the vocabulary for so many
    tensor-parallel ranks."""
    rows = [row for row in weight_table(arch, role).values() if row.copy_of is None]
    padding = 0 if tp is None else (padded_vocab_size(arch, tp) - arch.vocab_size) * arch.hidden_size
    return sum(sum(math.prod(shape) for shape in row.shapes) + (padding if row.kind == "vocab" else 0) for row in rows)


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of a forward pass; a multiplication with its addition counts as two.

    a_token: in the layers' matrices, with the experts that a token is sent to
    a_pair: in attention, for a token and each of the tokens up to it that it looks at
    an_output: in the head, for a token whose log-prob or value is asked for
    """

    a_token: int
    a_pair: int
    an_output: int

    @classmethod
    @cache
    def of(cls, arch: ModelArch, role: Role = "policy") -> ForwardFlops:
        """Norms, rotations and activations are left out: they are no matrix products."""
        inner = experts = 0
        for name, row in weight_table(arch, role).items():
            weights = sum(math.prod(shape) for shape in row.shapes if len(shape) > 1)
            if row.expert:
                experts += weights
            elif name not in (EMBEDDING, OUTPUT, VALUE_HEAD):
                inner += weights
        if arch.experts is not None:
            inner += experts * arch.experts.per_token // arch.experts.count
        outputs = 1 if role == "critic" else arch.vocab_size
        return cls(2 * inner, 4 * arch.num_heads * arch.head_dim * arch.num_layers, 2 * outputs * arch.hidden_size)

    def total(self, tokens: int, pairs: int, outputs: int) -> int:
        """Of one forward pass. pairs: s (s + 1) / 2 of each sequence of s tokens, added up; outputs: tokens whose
        log-prob or value is asked for."""
        return self.a_token * tokens + self.a_pair * pairs + self.an_output * outputs
