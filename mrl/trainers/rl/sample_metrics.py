"""Metrics of a step's samples and of the engines that generated them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mrl.core import Sample
from mrl.inference.load import Load


def load_metrics(loads: Sequence[Load], waiting: Load) -> dict[str, float]:
    """engines/running: requests that an engine was given at once, in the mean over the engines and the time that each
    had any; engines/waiting: those that waited for that, in the mean over the time of all; engines/tokens_per_s_...:
    response tokens of the slowest and the fastest engine a second of the time that it had requests. Nothing where no
    engine had any."""
    used = [load for load in loads if load.requests]
    if not used:
        return {}
    span, speeds = max(load.seconds for load in used), [load.tokens_per_s for load in used]
    return {
        "engines/running": sum(load.mean for load in used) / len(used),
        "engines/waiting": waiting.mean * waiting.seconds / max(span, 1e-9),
        "engines/tokens_per_s_slowest": min(speeds),
        "engines/tokens_per_s_fastest": max(speeds),
    }


def sample_metrics(samples: list[Sample]) -> dict[str, float]:
    """Means over the samples: the score, length in tokens, share cut off by max_new_tokens, share that scored 0 because
    a reward failed on it; and of each part of the score over the samples that have it."""
    n = len(samples)
    metrics = {
        "reward/mean": sum(s.score for s in samples) / n,
        "response/mean_tokens": sum(s.num_generated_tokens for s in samples) / n,
        "response/truncated": sum(s.finish_reason == "length" for s in samples) / n,
        "reward/failed": sum(bool(s.reward_error) for s in samples) / n,
    }
    if any(s.messages for s in samples):
        metrics["agent/turns"] = sum(m["role"] == "assistant" for s in samples for m in s.messages) / n
        metrics["agent/env_tokens"] = sum(len(s.response_ids) - s.num_generated_tokens for s in samples) / n
        metrics["agent/sequences"] = sum(max(1, len(s.sequence_lens)) for s in samples) / n
    for name in sorted({part for s in samples for part in s.score_parts} - {"score"}):
        values = [s.score_parts[name] for s in samples if name in s.score_parts]
        metrics[f"reward/{name}"] = sum(values) / len(values)
    return metrics


def validation_metrics(samples: Sequence[Sample], failed_count: bool, source_key: str) -> dict[str, float]:
    """`sample_metrics` of the samples that count, with `mean` instead of `reward/mean`; mean/SOURCE: of each data
    source; scored, of, scored/SOURCE, of/SOURCE: samples that a reward has judged, and all that were asked for.

    failed_count: those on which the reward has failed count with their score of 0 (reward.on_error: zero)
    Nothing is said of a mean that is of no sample.
    """
    by_source: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if (source := sample.request.prompt.row.get(source_key)) is not None:
            by_source[f"/{source}"].append(sample)
    metrics: dict[str, float] = {}
    for suffix, some in {"": samples, **by_source}.items():
        counted = [s for s in some if s.is_scored or (failed_count and s.reward_error and not s.left_out)]
        if counted and not suffix:
            metrics |= {name.removeprefix("reward/"): value for name, value in sample_metrics(counted).items()}
        elif counted:
            metrics[f"mean{suffix}"] = sum(s.score for s in counted) / len(counted)
        metrics[f"scored{suffix}"] = float(sum(s.is_scored for s in some))
        metrics[f"of{suffix}"] = float(len(some))
    return metrics
