"""Memory of routing replay: the experts of a step's tokens, kept beside the tokens."""

from __future__ import annotations

from mrl.plan.activations import INT64
from mrl.plan.workload import PlannedModel, StepWorkload

CODED = 4 * 4 / 3  # bytes of a choice in an engine's response: int32 in base64


def _step_bytes(work: StepWorkload) -> float:
    """Bytes of the choices of a step's tokens."""
    return work.size.learnt * work.lengths.mean * work.models["actor"].arch.choice_bytes


def pass_bytes(model: PlannedModel, work: StepWorkload) -> float:
    """Returns the device bytes of a micro-batch: its tokens' choices, indices, and count flags."""
    if work.size.replays == "off" or model.name != "actor":
        return 0.0
    return work.tokens[model.name].local(model.layout.context) * (model.arch.choice_bytes + INT64 + 1)


def recorded_bytes(work: StepWorkload) -> float:
    """Returns each rank's device bytes after the recording pass: the step's choices, and the buffer of their sum
    over ranks.
    """
    return 2 * _step_bytes(work) if work.size.replays == "trainer" else 0.0


def host_bytes(work: StepWorkload) -> float:
    """Returns each rank's host bytes, beside the step's tensors."""
    return 0.0 if work.size.replays == "off" else _step_bytes(work)


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
