"""Memory and operations of a vision tower on the ranks of the first pipeline stage.

Each of these ranks has the whole tower and processes all images of its micro-batches, whatever the tensor and context
parallelism.
"""

from __future__ import annotations

from mrl.families.arch import VisionArch
from mrl.families.flops import BACKWARD, TowerFlops
from mrl.plan.activations import FLOAT32, Tokens
from mrl.plan.grid import RankCoordinates
from mrl.plan.workload import PlannedModel, SampleLengths

# vectors of its width that autograd keeps of a patch, as saved by transformers' modules on a CPU: those of a layer of
# Qwen3-VL, of Qwen2.5-VL (whose norms are of float32), of the ends, and of each merger for deep features
PLAIN, GATED, ENDS, DEEP = 11, 15, 7, 3


def saved_bytes(vision: VisionArch, patches: float, dtype: int) -> float:
    """Returns the bytes that a forward pass keeps for the backward pass."""
    return patches * dtype * (vision.depth * _layer(vision) + (ENDS + DEEP * len(vision.deep)) * vision.width)


def forward_bytes(model: PlannedModel, coords: RankCoordinates, tokens: Tokens) -> float:
    """Returns the bytes of a pass without gradients: pixels, features, and the current layer; 0 for other stages and
    text models.
    """
    vision = model.arch.vision
    if vision is None or coords.pp:
        return 0.0
    patches = tokens.seen * vision.merge**2
    pixels = patches * vision.patch_values * (FLOAT32 + model.dtype)
    return pixels + patches * model.dtype * _layer(vision) + _features(model, vision, tokens)


def update_bytes(model: PlannedModel, coords: RankCoordinates, tokens: Tokens, in_flight: int) -> float:
    """Returns the bytes of a pass with gradients with `in_flight` micro-batches; a frozen tower keeps only features."""
    vision = model.arch.vision
    if vision is None or coords.pp:
        return 0.0
    kept = _features(model, vision, tokens)
    if model.trains_tower:
        patches = tokens.seen * vision.merge**2
        kept += saved_bytes(vision, patches, model.dtype) + patches * vision.patch_values * (FLOAT32 + model.dtype)
    return forward_bytes(model, coords, tokens) + in_flight * kept


def flops(model: PlannedModel, samples: float, lengths: SampleLengths, *, trained: bool = False) -> float:
    """Returns the operations of a pass over the images of `samples` samples, one image each; 0 for text models.

    trained: forward, and backward if the tower is trained
    """
    tower = TowerFlops.of(model.arch)
    if tower is None:
        return 0.0
    times = 1 + BACKWARD if trained and model.trains_tower else 1
    return times * samples * tower.picture(int(lengths.images * tower.vision.merge**2))


def _layer(vision: VisionArch) -> int:
    """Values of a patch that a layer keeps."""
    widths, ffns = (GATED, 4) if vision.gated else (PLAIN, 2)
    return widths * vision.width + ffns * vision.ffn_size


def _features(model: PlannedModel, vision: VisionArch, tokens: Tokens) -> float:
    return tokens.seen * model.arch.hidden_size * model.dtype * (1 + len(vision.deep))
