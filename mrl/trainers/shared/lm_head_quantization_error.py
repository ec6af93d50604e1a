"""Quantization error of an fp8 lm_head in the log-probs, measured on a few samples before a step's first update."""

from __future__ import annotations

from mrl.core import Rollout
from mrl.learner import Learner

MOST = 8  # samples
SHARE = 16  # one in so many samples: at most a fiftieth of what the update costs


def lm_head_quantization_error(actor: Learner, rollout: Rollout, temperature: float) -> dict[str, float]:
    """Returns actor/head_error_mean and _max in nats; {} if the lm_head is not in fp8. Collective.

    The error is the distance of a log-prob to that of a head in model.dtype, over the response tokens of the step's
    first samples. It takes a forward pass of its own over samples that are the same in every parallel layout.
    """
    if not actor.train.precision.fp8.head:
        return {}
    samples = range(min(MOST, -(-rollout.num_samples // SHARE)))
    error = actor.lm_head_quantization_error(rollout.part(samples), temperature).abs()
    if not error.numel():
        return {}
    return {"actor/head_error_mean": float(error.mean()), "actor/head_error_max": float(error.max())}
