"""Routing replay in bytes: which experts a step's tokens go to, kept beside them."""

from __future__ import annotations

from mrl.plan.activations import INT64
from mrl.plan.workload import Model, Work

CODED = 4 * 4 / 3  # bytes of a choice in an engine's answer: int32 in base64


def _step_bytes(work: Work) -> float:
    """Of the choices of a step's tokens."""
    return work.size.learnt * work.lengths.mean * work.models["actor"].arch.choice_bytes


def pass_bytes(model: Model, work: Work) -> float:
    """On the device, of a micro-batch: its tokens' choices, their places, and whether they are counted."""
    if work.size.replays == "off" or model.name != "actor":
        return 0.0
    return work.tokens[model.name].local(model.layout.context) * (model.arch.choice_bytes + INT64 + 1)


def noted_bytes(work: Work) -> float:
    """On every rank's device, at the end of the pass that notes what the routers choose: of all tokens of the step, its
    own and what becomes the sum over the ranks."""
    return 2 * _step_bytes(work) if work.size.replays == "trainer" else 0.0


def host_bytes(work: Work) -> float:
    """On every rank's host, with the tensors of the step."""
    return 0.0 if work.size.replays == "off" else _step_bytes(work)


def sample_bytes(work: Work) -> float:
    """On rank 0's host, with the samples: what the engine has said, small, and the answers that it was read from, whose
    layers without experts are in them too."""
    arch = work.models["actor"].arch
    if work.size.replays != "engine" or arch.experts is None:
        return 0.0
    coded = arch.num_layers * arch.experts.per_token * CODED
    return work.size.sampled * work.lengths.mean * (arch.choice_bytes + coded)
