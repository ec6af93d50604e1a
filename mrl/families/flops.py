"""Numbers of weights and of floating-point operations of a model, from the weight table, for reports and
predictions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from mrl.families.arch import ModelArch, VisionArch
from mrl.families.table import DELTA_CHUNK, EMBEDDING, OUTPUT, VALUE_HEAD, Role, padded_vocab_size, weight_table
from mrl.families.vision import TOWER

BACKWARD = 2  # times a forward pass: gradients of the inputs, gradients of the weights
BACKWARD_OF_FROZEN = 1  # gradients of the inputs alone; the adapters' operations are left out


def num_parameters(arch: ModelArch, role: Role = "policy", tp: int | None = None) -> int:
    """Returns the number of trainable weights of the whole model, counting a tied embedding once.

    tp: also counts the rows that pad the vocabulary for that many tensor-parallel ranks
    """
    rows = [row for row in weight_table(arch, role).values() if row.copy_of is None and not row.frozen]
    padding = 0 if tp is None else (padded_vocab_size(arch, tp) - arch.vocab_size) * arch.hidden_size
    return sum(sum(math.prod(shape) for shape in row.shapes) + (padding if row.kind == "vocab" else 0) for row in rows)


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of a forward pass; a multiplication with its addition counts as two.

    per_token: in the layers' matrices, with the experts that a token is routed to, and in gated delta nets
    per_pair: in attention, for a token and each token it attends to
    per_output: in the head, for a token whose log-prob or value is computed
    """

    per_token: int
    per_pair: int
    per_output: int

    @classmethod
    @cache
    def of(cls, arch: ModelArch, role: Role = "policy") -> ForwardFlops:
        """Counts matrix products only: no norms, rotations or activations.

        A vision tower is counted in `TowerFlops`, by patches.
        """
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
        deltas = sum(layer.delta for layer in arch.layers)
        a_pair = 2 * arch.num_heads * (arch.head_dim + arch.value_dim) * (arch.num_layers - deltas)
        return cls(2 * inner + deltas * _delta_rule(arch), a_pair, 2 * outputs * arch.hidden_size)

    def total(self, tokens: int, pairs: int, outputs: int) -> int:
        """Returns the operations of one forward pass.

        pairs: s (s + 1) / 2 of each sequence of s tokens, added up; outputs: tokens whose log-prob or value is
        computed.
        """
        return self.per_token * tokens + self.per_pair * pairs + self.per_output * outputs


def _delta_rule(arch: ModelArch) -> int:
    """Operations a token of a gated delta net's products inside of full chunks, and with the state."""
    if arch.delta is None:
        return 0
    key, value = arch.delta.key, arch.delta.value
    return arch.delta.value_heads * (2 * DELTA_CHUNK * (2 * key + value) + 6 * key * value)


@dataclass(frozen=True)
class TowerFlops:
    """Operations of a vision tower's forward pass, counted as in `ForwardFlops`.

    per_patch: in its matrices, with a patch's share of the merged feature; per_pair: in attention, for a patch and
    each patch it attends to, in one layer
    """

    per_patch: int
    per_pair: int
    vision: VisionArch

    @classmethod
    @cache
    def of(cls, arch: ModelArch) -> TowerFlops | None:
        """Returns the counts; None for a text-only model."""
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
        """Returns the operations for one image of `patches` patches."""
        vision = self.vision
        whole = vision.whole_layers if vision.window else vision.depth
        looked_at = whole * patches + (vision.depth - whole) * min(patches, vision.window)
        return patches * (self.per_patch + self.per_pair * looked_at)
