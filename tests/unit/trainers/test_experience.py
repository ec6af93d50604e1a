"""The experience of a step whose samples are resampled by their scores."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from mrl import platform

platform.install()

from mrl.config.schema import PFPPOConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.trainers.rl.correction import FlatCorrection  # noqa: E402
from mrl.trainers.rl.experience import Experience, resampled  # noqa: E402
from mrl.trainers.rl.replay import Reused  # noqa: E402

LENGTHS = torch.tensor([3, 1, 5, 2, 4, 1])


def experience(step: int = 0) -> Experience:
    """Returns an experience whose vectors encode sample, token and the vector's name."""
    count, total = LENGTHS.numel(), int(LENGTHS.sum())
    place = 100.0 * torch.arange(count).repeat_interleave(LENGTHS) + torch.cat([torch.arange(n) for n in LENGTHS])
    rollout = Rollout(
        step=step,
        tokens=torch.arange(total + count),
        seq_lens=LENGTHS + 1,
        prompt_lens=torch.ones(count, dtype=torch.int64),
        group=torch.arange(count) // 2,
        scores=torch.tensor([0.0, 1.0, -1.0, 0.5, 0.0, 2.0]),
        rollout_log_probs=place,
    )
    old = torch.arange(count) >= 4
    log_probs = place + 0.3
    return Experience(
        rollout=rollout,
        advantages=place + 0.1,
        returns=place + 0.2,
        old_log_probs=log_probs,
        trainer_log_probs=log_probs,
        ref_log_probs=place + 0.4,
        values=place + 0.5,
        mean_ref_kl=0.7,
        is_old_policy=True,
        entropies=place + 0.6,
        correction=FlatCorrection(place + 0.7, place < 400, {"a": 1.0}),
        reused=Reused(old, old.repeat_interleave(LENGTHS), place + 0.8),
    )


def vectors(exp: Experience) -> dict[str, Tensor]:
    assert exp.correction is not None and exp.correction.weights is not None and exp.reused is not None
    found = {field.name: value for field in fields(exp) if isinstance(value := getattr(exp, field.name), Tensor)}
    return found | {"weights": exp.correction.weights, "reused": exp.reused.old_log_probs}


def test_every_vector_goes_with_its_sample() -> None:
    whole, cfg = experience(), PFPPOConfig(reweight_method="pow", weight_pow=2.0)
    drawn = resampled(cfg, whole, seed=3)
    assert drawn.rollout.num_samples == 6 and len(set(drawn.rollout.scores.tolist())) < 5, "none was drawn twice"
    assert 0.0 not in drawn.rollout.scores, "of weight 0"
    places = drawn.rollout.rollout_log_probs
    for name, vector in vectors(drawn).items():
        offset = vectors(whole)[name][0] - whole.rollout.rollout_log_probs[0]
        assert torch.allclose(vector - places, offset.expand_as(places), atol=1e-4), name
    assert drawn.is_old_policy and drawn.rollout.response_lens.sum() == places.numel()
    assert drawn.correction is not None and torch.equal(drawn.correction.keep, places < 400)
    assert drawn.reused is not None and torch.equal(drawn.reused.tokens, places >= 400)
    assert torch.equal(
        drawn.reused.samples, drawn.rollout.rollout_log_probs[drawn.rollout.response_lens.cumsum(0) - 1] >= 400
    )


def test_a_draw_follows_from_seed_and_step_alone() -> None:
    def scores(cfg: PFPPOConfig | None, step: int, seed: int) -> list[float]:
        return resampled(cfg, experience(step), seed).rollout.scores.tolist()

    cfg = PFPPOConfig(reweight_method="max_random")
    torch.manual_seed(1)
    first = scores(cfg, 4, 1)
    torch.manual_seed(2)
    assert scores(cfg, 4, 1) == first
    assert len({tuple(scores(cfg, step, seed)) for step, seed in ((4, 1), (5, 1), (4, 2))}) == 3
    assert scores(None, 4, 1) == experience().rollout.scores.tolist()


def test_nothing_is_made_up_where_log_probs_are_not_known_yet() -> None:
    bare = replace(experience(), old_log_probs=None, trainer_log_probs=None, correction=None, reused=None)
    drawn = resampled(PFPPOConfig(), bare, 1)
    assert drawn.old_log_probs is drawn.trainer_log_probs is None
    assert drawn.correction is drawn.reused is None
