"""How many weights a model has, and how many floating-point operations its passes take. Arithmetic on the weight table,
for what a run prints and for what is predicted of one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from mrl.families.arch import ModelArch, VisionArch
from mrl.families.table import EMBEDDING, OUTPUT, VALUE_HEAD, Role, padded_vocab_size, weight_table
from mrl.families.vision import TOWER

BACKWARD = 2  # times a forward pass: gradients of the inputs, gradients of the weights
BACKWARD_OF_FROZEN = 1  # those of the inputs alone; what adapters add is left out


def num_parameters(arch: ModelArch, role: Role = "policy", tp: int | None = None) -> int:
    """Weights of the whole model that may be trained, a tied embedding once; with `tp` also the rows that pad the
    vocabulary for so many tensor-parallel ranks."""
    rows = [row for row in weight_table(arch, role).values() if row.copy_of is None and not row.frozen]
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
        """Norms, rotations and activations are left out: they are no matrix products. A vision tower is in
        `TowerFlops`: its work is by the patch of a picture."""
        inner = experts = 0
        for name, row in weight_table(arch, role).items():
            weights = sum(math.prod(shape) for shape in row.shapes if len(shape) > 1)
            if row.expert:
                experts += weights
            elif name not in (EMBEDDING, OUTPUT, VALUE_HEAD) and not name.startswith(TOWER):
                inner += weights
        if arch.experts is not None:
            inner += experts * arch.experts.per_token // arch.experts.count
        outputs = arch.score_heads if role == "critic" else arch.vocab_size
        a_pair = 2 * arch.num_heads * (arch.head_dim + arch.value_dim) * arch.num_layers
        return cls(2 * inner, a_pair, 2 * outputs * arch.hidden_size)

    def total(self, tokens: int, pairs: int, outputs: int) -> int:
        """Of one forward pass. pairs: s (s + 1) / 2 of each sequence of s tokens, added up; outputs: tokens whose
        log-prob or value is asked for."""
        return self.a_token * tokens + self.a_pair * pairs + self.an_output * outputs


@dataclass(frozen=True)
class TowerFlops:
    """Operations of a vision tower's forward pass, counted as those of `ForwardFlops`.

    a_patch: in its matrices, with a patch's share of what becomes one feature; a_pair: in attention, for a patch and
    each that it looks at, in one layer
    """

    a_patch: int
    a_pair: int
    vision: VisionArch

    @classmethod
    @cache
    def of(cls, arch: ModelArch) -> TowerFlops | None:
        """None for a model of text alone."""
        vision = arch.vision
        if vision is None:
            return None
        blocks = merged = 0
        for name, row in weight_table(arch).items():
            if name.startswith(TOWER) and len(row.shapes[0]) > 1 and "pos_embed" not in name:
                weights = math.prod(row.shapes[0])
                if "merger" in name:
                    merged += weights
                else:
                    blocks += weights
        return cls(2 * blocks + 2 * merged // vision.merge**2, 4 * vision.width, vision)

    def picture(self, patches: int) -> int:
        """Of one with so many."""
        vision = self.vision
        whole = vision.whole_layers if vision.window else vision.depth
        looked_at = whole * patches + (vision.depth - whole) * min(patches, vision.window)
        return patches * (self.a_patch + self.a_pair * looked_at)
