"""What a loss head in fp8 does to a step's log-probs: measured on a few of its samples, before its first update."""

from __future__ import annotations

from mrl.core import Rollout
from mrl.learner import Learner

MOST = 8  # samples
SHARE = 16  # one in so many samples: at most a fiftieth of what the update costs


def head_error(actor: Learner, rollout: Rollout, temperature: float) -> dict[str, float]:
    """{} where the head is not in fp8, else actor/head_error_mean and _max: over the response tokens of the step's
    first samples, nats that a log-prob is off the one of a head in model.dtype. Collective.

    A pass of its own over samples that every layout chooses alike; the update itself waits for nothing.
    """
    if not actor.train.precision.fp8.head:
        return {}
    samples = range(min(MOST, -(-rollout.num_samples // SHARE)))
    error = actor.head_error(rollout.part(samples), temperature).abs()
    if not error.numel():
        return {}
    return {"actor/head_error_mean": float(error.mean()), "actor/head_error_max": float(error.max())}
