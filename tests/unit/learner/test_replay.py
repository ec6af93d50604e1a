"""The replay buffer: which samples are kept and drawn, and that old log-probs stay with their samples."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.config.schema import MismatchConfig, ReplayConfig
from mrl.config.sections.algorithm import algorithm
from mrl.core import Rollout
from mrl.trainers.rl.experience import forward_passes, make_experience
from mrl.trainers.rl.mismatch import MismatchLimits
from mrl.trainers.rl.replay import Replay, ReplayBuffer, Reused

PER_PROMPT = 2


class OneRank:
    """The parts of World that `Replay` uses, on one rank."""

    is_main = True

    def from_main(self, what: str, make: Callable[[], Any]) -> Any:
        return make()


def new_samples(step: int, prompts: int = 3) -> Rollout:
    """Returns a rollout whose tokens encode step, sample and position; log-probs are a function of the token."""
    count = prompts * PER_PROMPT
    generator = torch.Generator().manual_seed(step)
    prompt_lens, responses = (torch.randint(1, 6, (count,), generator=generator) for _ in range(2))
    lens = prompt_lens + responses
    sample = torch.arange(count).repeat_interleave(lens)
    place = torch.arange(int(lens.sum())) - (lens.cumsum(0) - lens).repeat_interleave(lens)
    tokens = 10_000 * step + 100 * sample + place
    return Rollout(
        step=step,
        tokens=tokens,
        seq_lens=lens,
        prompt_lens=prompt_lens,
        group=torch.arange(count) // PER_PROMPT,
        scores=torch.arange(count) + 100.0 * step,
        rollout_log_probs=log_prob(tokens[place >= prompt_lens.repeat_interleave(lens)]),
        rows=torch.arange(count) // PER_PROMPT + 10 * step,
        weight_versions=torch.full((count,), step),
    )


def log_prob(tokens: Tensor) -> Tensor:
    return -tokens.float() / 1e6


def response_tokens(rollout: Rollout) -> Tensor:
    lens = rollout.seq_lens
    place = torch.arange(int(lens.sum())) - (lens.cumsum(0) - lens).repeat_interleave(lens)
    return rollout.tokens[place >= rollout.prompt_lens.repeat_interleave(lens)]


def config(buffer: int, drawn: int, age: int | None = None) -> ReplayConfig:
    return ReplayConfig(buffer_prompts=buffer, prompts_per_step=drawn, max_age_steps=age)


def a_step(replay: Replay, step: int) -> tuple[Rollout, Any, dict[str, float]]:
    """Runs a step as the loop does: old log-probs are the trainer's, or the buffer's for replayed tokens."""
    mixed, reused, metrics = replay.mix(new_samples(step))
    trainers = log_prob(response_tokens(mixed)) + 5.0 * step  # the policy changes: no two steps agree on a token
    old = trainers if reused is None else torch.where(reused.tokens, reused.old_log_probs, trainers)
    replay.keep(mixed, reused, old)
    return mixed, reused, metrics


def steps_of(mixed: Rollout) -> Tensor:
    """Returns the step in which each sample was generated."""
    return mixed.rows // 10 if mixed.rows is not None else torch.empty(0)


def test_nothing_is_re_used_before_there_is_enough_then_always_as_much() -> None:
    replay = Replay(config(buffer=12, drawn=4), 1, OneRank())  # type: ignore[arg-type]
    found = [a_step(replay, step)[2] for step in range(6)]
    assert [row["replay/samples"] for row in found] == [0, 0, *[4 * PER_PROMPT] * 4]
    assert 1 < found[-1]["replay/age_steps"] <= 4


def test_every_new_sample_is_there_once_and_old_ones_come_in_whole_groups() -> None:
    replay = Replay(config(buffer=9, drawn=4), 1, OneRank())  # type: ignore[arg-type]
    for step in range(5):
        mixed, reused, _ = a_step(replay, step)
        new = new_samples(step)
    assert reused is not None and mixed.step == 4
    is_new = ~reused.samples
    assert sorted(mixed.scores[is_new].tolist()) == new.scores.tolist()
    assert (steps_of(mixed)[is_new] == 4).all() and (steps_of(mixed)[reused.samples] < 4).all()
    groups, sizes = mixed.group.unique(return_counts=True)
    assert groups.numel() == 3 + 4 and (sizes == PER_PROMPT).all()
    assert mixed.rows is not None
    assert all(mixed.rows[mixed.group == group].unique().numel() == 1 for group in groups), "groups got mixed up"


def test_old_log_probs_are_those_of_the_policy_that_drew_the_sample() -> None:
    replay = Replay(config(buffer=9, drawn=4), 1, OneRank())  # type: ignore[arg-type]
    for step in range(5):
        mixed, reused, _ = a_step(replay, step)
    assert reused is not None
    step_of_token = steps_of(mixed).repeat_interleave(mixed.response_lens)
    then = log_prob(response_tokens(mixed)) + 5.0 * step_of_token
    assert torch.allclose(reused.old_log_probs[reused.tokens], then[reused.tokens])
    assert (reused.old_log_probs[~reused.tokens] == 0).all()
    assert torch.equal(mixed.rollout_log_probs, log_prob(response_tokens(mixed)))


def test_old_and_new_groups_are_mixed_over_the_mini_batches() -> None:
    replay = Replay(config(buffer=30, drawn=10), 1, OneRank())  # type: ignore[arg-type]
    for step in range(4):
        replay.buffer.add(new_samples(step, prompts=10), torch.zeros(new_samples(step, prompts=10).num_response_tokens))
    mixed, reused, _ = replay.mix(new_samples(4, prompts=10))
    assert reused is not None
    halves = reused.samples.split(mixed.num_samples // 2)
    assert all(0 < int(half.sum()) < half.numel() for half in halves)


class Policy:
    """A trainer whose log-probs equal the engine's for new samples, and differ by `gap` for replayed ones."""

    def __init__(self, gap: float, reused: Reused) -> None:
        self.gap, self.reused = gap, reused

    def log_probs(self, rollout: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
        return rollout.rollout_log_probs + self.gap * self.reused.tokens, torch.zeros(rollout.num_response_tokens)


@pytest.mark.parametrize("importance", [None, "token"])
def test_the_ratio_of_an_old_sample_is_to_the_policy_that_drew_it(importance: str | None) -> None:
    """The ratio of a replayed sample is to the policy that generated it. With importance weights it is to the present
    policy, and the weight covers the rest."""
    replay = Replay(config(buffer=9, drawn=4), 1, OneRank())  # type: ignore[arg-type]
    for step in range(3):
        mixed, reused, _ = a_step(replay, step)
    assert reused is not None
    policy, settings = Policy(0.5, reused), {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": importance}}
    cfg = algorithm(**settings)
    passes = forward_passes(cfg, mixed, 1.0, policy)  # type: ignore[arg-type]
    made = make_experience(cfg, mixed, passes, 0.0, reused)
    present, _ = policy.log_probs(mixed, 1.0)
    assert made.trainer_log_probs is not None and made.old_log_probs is not None
    assert torch.equal(made.trainer_log_probs, present)
    if importance is None:
        assert torch.equal(made.old_log_probs, torch.where(reused.tokens, reused.old_log_probs, present))
        assert not torch.equal(made.old_log_probs, present)
    else:
        assert made.correction is not None and made.correction.weights is not None
        assert torch.equal(made.old_log_probs, present)
        assert torch.allclose(made.correction.weights, torch.where(reused.tokens, math.exp(0.5), 1.0))
    gap = MismatchLimits(MismatchConfig(), print).check(mixed, made.trainer_log_probs, made.is_new)
    assert gap["mismatch/max_abs"] == 0, "of engine and trainer, not of old and new policies"
    assert made.num_new_samples == 3 * PER_PROMPT


def test_the_oldest_go_first_and_what_is_too_old_goes_too() -> None:
    buffer = ReplayBuffer(config(buffer=7, drawn=7), 1)
    for step in range(4):
        rollout = new_samples(step)
        buffer.add(rollout, rollout.rollout_log_probs)
    assert len(buffer) == 7
    drawn = buffer.draw(4)
    assert drawn is not None and drawn[0].rows is not None
    assert sorted(drawn[0].rows.unique().tolist()) == [12, 20, 21, 22, 30, 31, 32]
    bounded = ReplayBuffer(config(buffer=9, drawn=4, age=2), 1)
    for step in range(4):
        bounded.add(new_samples(step), new_samples(step).rollout_log_probs)
    drawn = bounded.draw(4)
    assert drawn is not None and set(steps_of(drawn[0]).tolist()) <= {2, 3}
    assert bounded.draw(6) is None and len(bounded) == 0


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 3))
def test_a_buffer_that_was_saved_goes_on_as_if_it_had_not_been(drawn: int, more: int, seed: int) -> None:
    replays = [Replay(config(drawn + more, drawn), seed, OneRank()) for _ in range(2)]  # type: ignore[arg-type]
    for step in range(3):
        a_step(replays[0], step)
    file = io.BytesIO()
    torch.save(replays[0].buffer.state_dict(), file)
    file.seek(0)
    replays[1].buffer.load_state_dict(torch.load(file, weights_only=True))
    for step in range(3, 6):
        (a, reused_a, _), (b, reused_b, _) = (a_step(replay, step) for replay in replays)
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.group, b.group)
        assert (reused_a is None) == (reused_b is None)
        assert reused_a is None or torch.equal(reused_a.old_log_probs, reused_b.old_log_probs)


def test_draws_follow_from_seed_and_step() -> None:
    def drawn(seed: int, step: int) -> list[int]:
        buffer = ReplayBuffer(config(buffer=30, drawn=6), seed)
        for at in range(6):
            buffer.add(new_samples(at), new_samples(at).rollout_log_probs)
        found = buffer.draw(step)
        assert found is not None and found[0].rows is not None
        return sorted(found[0].rows.unique().tolist())

    assert drawn(1, 6) == drawn(1, 6)
    assert drawn(1, 6) != drawn(1, 7) != drawn(2, 7)


@pytest.mark.parametrize("parts", [{"score_parts": torch.randn(6, 2)}, {"greedy_scores": torch.randn(6)}])
def test_what_an_estimator_needs_of_a_sample_stays_with_it(parts: dict[str, Tensor]) -> None:
    (name, values), rollout = next(iter(parts.items())), replace(new_samples(1), **parts)  # type: ignore[arg-type]
    buffer = ReplayBuffer(config(buffer=3, drawn=2), 1)
    buffer.add(rollout, rollout.rollout_log_probs)
    drawn = buffer.draw(2)
    assert drawn is not None
    ids = (drawn[0].scores - 100.0).long()
    assert torch.equal(vars(drawn[0])[name], values[ids])


def saved_and_read(buffer: ReplayBuffer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kept", [True, False])
def test_the_weights_that_drew_a_sample_are_known_after_a_resume(kept: bool) -> None:
    """The weight versions of replayed samples survive a resume, also from a checkpoint that lacks them."""
    replay = Replay(config(buffer=9, drawn=4), 1, OneRank())  # type: ignore[arg-type]
    for step in range(3):
        a_step(replay, step)
    state = saved_and_read(replay.buffer)
    for step in [] if kept else state["steps"]:
        del step["rollout"]["weight_versions"]
    resumed = Replay(config(buffer=9, drawn=4), 1, OneRank())  # type: ignore[arg-type]
    resumed.buffer.load_state_dict(state)
    mixed, reused, _ = resumed.mix(new_samples(3))
    assert reused is not None and mixed.weight_versions is not None
    assert torch.equal(mixed.weight_versions, steps_of(mixed))


def test_a_step_with_other_log_probs_than_tokens_is_not_kept() -> None:
    rollout = new_samples(0)
    with pytest.raises(ValueError, match=r"old_log_probs has shape \[17\].* 18 response tokens"):
        ReplayBuffer(config(buffer=9, drawn=4), 1).add(rollout, rollout.rollout_log_probs[1:])


def test_pictures_are_replayed_too() -> None:
    def pictured(step: int) -> Rollout:
        """Returns new samples. A sample has as many images as its row's number; each image encodes the row."""
        plain = new_samples(step)
        assert plain.rows is not None
        counts = plain.rows % 10
        return replace(plain, image_counts=counts, images=plain.rows.repeat_interleave(counts))

    replay = Replay(config(buffer=9, drawn=4), 1, OneRank())  # type: ignore[arg-type]
    for step in range(4):
        mixed, reused, _ = replay.mix(pictured(step))
        replay.keep(mixed, reused, log_prob(response_tokens(mixed)))
    assert reused is not None
    assert mixed.rows is not None and mixed.image_counts is not None and mixed.images is not None
    assert torch.equal(mixed.image_counts, mixed.rows % 10)
    assert torch.equal(mixed.images, mixed.rows.repeat_interleave(mixed.image_counts))
