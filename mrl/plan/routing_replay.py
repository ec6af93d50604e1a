"""Memory of routing replay: the experts of a step's tokens, all of them on rank 0, and of each rank's share."""

from __future__ import annotations

from mrl.plan.activations import INT64
from mrl.plan.grid import RankCoordinates, chunk_layers
from mrl.plan.workload import PlannedModel, StepWorkload

CODED = 4 * 4 / 3  # bytes of a choice in an engine's response: int32 in base64


def _share_bytes(work: StepWorkload, stage: int) -> float:
    """Bytes of the choices of a rank's part of a step: its samples, and the layers of its pipeline stage."""
    model = work.models["actor"]
    tokens = work.size.learnt * work.lengths.mean / (model.grid.dp * model.layout.context)
    return tokens * _choice_bytes(model, stage)


def _choice_bytes(model: PlannedModel, stage: int) -> float:
    """Bytes of a token's choices in the layers of a stage."""
    layers = model.arch.layers
    own = sum(layers[i].experts for chunk in chunk_layers(model.layout, len(layers), stage) for i in chunk)
    return model.arch.choice_bytes * own / max(1, sum(layer.experts for layer in layers))


def pass_bytes(model: PlannedModel, work: StepWorkload, stage: int) -> float:
    """Returns the device bytes of a micro-batch: its tokens' choices, indices, and count flags."""
    if work.size.replays == "off" or model.name != "actor":
        return 0.0
    return work.tokens[model.name].local(model.layout.context) * (_choice_bytes(model, stage) + INT64 + 1)


def recorded_bytes(work: StepWorkload, stage: int) -> float:
    """Returns a rank's device bytes after the recording pass: the choices of its tokens."""
    return _share_bytes(work, stage) if work.size.replays == "trainer" else 0.0


def host_bytes(work: StepWorkload, coords: RankCoordinates) -> float:
    """Returns a rank's host bytes, beside the step's tensors: its share, on the first of the tensor-parallel ranks, and
    on rank 0 the choices of all tokens of the step.
    """
    if work.size.replays == "off":
        return 0.0
    whole = work.size.learnt * work.lengths.mean * work.models["actor"].arch.choice_bytes if coords.rank == 0 else 0.0
    return whole + (_share_bytes(work, coords.pp) if coords.tp == 0 else 0.0)


def sample_bytes(work: StepWorkload) -> float:
    """Returns rank 0's host bytes, beside the samples: the decoded choices, and the engines' responses they are read
    from.

    The responses include layers without experts.
    """
    arch = work.models["actor"].arch
    if work.size.replays != "engine" or arch.experts is None:
        return 0.0
    coded = arch.num_layers * arch.experts.per_token * CODED
    return work.size.sampled * work.lengths.mean * (arch.choice_bytes + coded)
