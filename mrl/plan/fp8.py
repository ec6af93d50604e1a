"""Effect of fp8 products on a plan: bytes of weights and of saved activations, rates of arithmetic.

transformer-engine's layers (module/linear.py) keep each matrix cast for the forward pass and, if there is a backward
pass, a second cast for it, from the first micro-batch of a pass to the next pass; of a product's input they keep the
cast alone. Emulation keeps nothing; operands are rounded to float32 during a product. Read in the sources, not measured
on a GPU.
"""

from __future__ import annotations

from mrl.families.table import VOCAB_ALIGN_GPU, padded_vocab_size
from mrl.plan.activations import FLOAT32, Tokens
from mrl.plan.chips import Assumptions, Chip
from mrl.plan.grid import RankCoordinates
from mrl.plan.parameters import matrices
from mrl.plan.workload import PlannedModel

# bytes of a number with its share of a scale: float32 per tensor or block, one byte per 32 numbers of mxfp8
NUMBER = {"current": 1.0, "delayed": 1.0, "blockwise": 1 + FLOAT32 / 128**2, "mxfp8": 1 + 1 / 32}


def cast_bytes(model: PlannedModel, coords: RankCoordinates) -> float:
    """Returns the bytes of the fp8 casts of a rank's layer matrices; 0 without transformer-engine's fp8."""
    fp8 = model.train.precision.fp8
    if not fp8.is_real:
        return 0.0
    each = NUMBER[fp8.recipe] * (2 if model.is_trained else 1)
    return matrices(model.arch, model.role, model.layout, coords.pp, fp8.first_last_bf16) * each


def saved_weight_bytes(model: PlannedModel, coords: RankCoordinates) -> float:
    """Returns the bytes saved by weights held in fp8 alone, which `cast_bytes` counts."""
    fp8 = model.train.precision.fp8
    if not fp8.is_real or not fp8.params:
        return 0.0
    return float(matrices(model.arch, model.role, model.layout, coords.pp, fp8.first_last_bf16) * model.dtype)


def working_bytes(model: PlannedModel, tokens: Tokens) -> float:
    """Returns the bytes of the rounded operands and the result of a layer's largest product, with emulation."""
    fp8 = model.train.precision.fp8
    if fp8.recipe == "none" or not fp8.emulate:
        return 0.0
    arch, p = model.arch, model.layout
    widths = [2 * w / p.tensor for w in (arch.dense_width,) if w is not None]
    widths += [2 * w / p.expert_tensor_size for w in (arch.expert_width,) if w is not None]
    widest = max(*widths, (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim / p.tensor)
    local = tokens.local(p.context)
    return FLOAT32 * (widest * arch.hidden_size + local * (arch.hidden_size + widest))


def head_bytes(model: PlannedModel, tokens: Tokens, *, trained: bool) -> float:
    """Returns the bytes of the lm_head weight in fp8; with emulation of it and the hidden states in float32, per
    direction.
    """
    fp8 = model.train.precision.fp8
    if not fp8.head or model.role != "policy":
        return 0.0
    rows = padded_vocab_size(model.arch, model.layout.tensor, VOCAB_ALIGN_GPU) // model.layout.tensor
    if not fp8.emulate:
        return 2 * NUMBER[fp8.recipe] * rows * model.arch.hidden_size
    outputs = tokens.response / model.layout.context
    return FLOAT32 * (rows + outputs) * model.arch.hidden_size * (2 if trained else 1)


def layers_rate(model: PlannedModel, chip: Chip, assumed: Assumptions) -> float:
    """Returns the operations a second of the layers' matrices, including unrounded layers at the ends."""
    fp8, plain = model.train.precision.fp8, chip.bf16 * assumed.matmul_share
    share = 1 - 2 * fp8.first_last_bf16 / model.arch.num_layers
    return 1 / (share / _rate(model, chip, assumed) + (1 - share) / plain)


def head_rate(model: PlannedModel, chip: Chip, assumed: Assumptions) -> float:
    """Returns the operations a second of the loss head."""
    is_rounded = model.train.precision.fp8.head
    return _rate(model, chip, assumed) if is_rounded else chip.bf16 * assumed.matmul_share


def _rate(model: PlannedModel, chip: Chip, assumed: Assumptions) -> float:
    """Operations a second; a chip without fp8 is reported as a shortage elsewhere."""
    if model.train.precision.fp8.is_real and chip.fp8 is not None:
        return chip.fp8 * assumed.fp8_share
    return chip.bf16 * assumed.matmul_share


def words(model: PlannedModel) -> str:
    """Returns the suffix for the name of a computation."""
    fp8 = model.train.precision.fp8
    if fp8.recipe == "none":
        return ""
    return " in fp8" if fp8.is_real else ", fp8 emulated (time of rounding not counted)"
