"""A step's samples as flat tensors: selecting some samples, and joining those of several steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl import units
from mrl.core import Rollout
from mrl.units import NUMBERING, PerResponseToken, PerSample, Unit

Lengths = list[tuple[int, int]]  # prompt, response tokens of each sample
some_lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=8)


def rollout_of(lengths: Lengths, first: int = 0) -> Rollout:
    """Returns a rollout in groups of two. Every token and log-prob is a different number, from `first` on."""
    prompts, responses = (torch.tensor(x) for x in zip(*lengths, strict=True))
    tokens, outputs = int((prompts + responses).sum()), int(responses.sum())
    return Rollout(
        step=first,
        tokens=torch.arange(first, first + tokens),
        seq_lens=prompts + responses,
        prompt_lens=prompts,
        group=torch.arange(len(lengths)) // 2,
        scores=torch.arange(len(lengths)) + float(first),
        rollout_log_probs=-torch.arange(float(outputs)) - first,
        rows=torch.arange(len(lengths)) + first,
    )


def samples(rollout: Rollout) -> list[tuple[object, ...]]:
    """Returns the samples one by one, cut from the flat tensors by definition."""
    found, token, output = [], 0, 0
    for i in range(rollout.num_samples):
        length, response = int(rollout.seq_lens[i]), int(rollout.response_lens[i])
        tokens = rollout.tokens[token : token + length].tolist()
        log_probs = rollout.rollout_log_probs[output : output + response].tolist()
        assert rollout.rows is not None
        found.append((tokens, response, log_probs, float(rollout.scores[i]), int(rollout.rows[i])))
        token, output = token + length, output + response
    return found


@settings(deadline=None)
@given(some_lengths, st.data())
def test_some_samples_of_a_rollout_are_themselves(lengths: Lengths, data: st.DataObject) -> None:
    rollout = rollout_of(lengths)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True))
    picked = rollout.pick(torch.tensor(chosen))
    assert samples(picked) == [samples(rollout)[i] for i in chosen]
    assert picked.group.tolist() == [i // 2 for i in chosen]
    flat = rollout.flat_of(torch.tensor(chosen), rollout.rollout_log_probs)
    assert torch.equal(flat, picked.rollout_log_probs)


@settings(deadline=None)
@given(some_lengths, some_lengths, some_lengths)
def test_samples_of_several_rollouts_stay_what_they_are(a: Lengths, b: Lengths, c: Lengths) -> None:
    parts = [rollout_of(lengths, 1000 * i) for i, lengths in enumerate((a, b, c))]
    joined = parts[0].join(*parts[1:])
    assert samples(joined) == [sample for part in parts for sample in samples(part)]
    before = [(i, int(g)) for i, part in enumerate(parts) for g in part.group]
    alike = [[x == y for y in before] for x in before]
    assert (joined.group[:, None] == joined.group[None]).tolist() == alike
    assert joined.step == parts[0].step


def test_a_rollout_without_rows_has_none_when_it_is_cut_or_joined() -> None:
    rollout = replace(rollout_of([(1, 2), (3, 1)]), rows=None)
    assert rollout.pick(torch.tensor([1])).rows is None and rollout.join(rollout).rows is None


# ---- a field needs only the declaration of its unit


@dataclass(frozen=True)
class WithImages(Rollout):
    """A rollout class with a field of another unit."""


def with_images(lengths: Lengths, counts: list[int], first: int = 0) -> WithImages:
    """Returns a rollout with images [I, 2]: the sample's score and a number."""
    plain, each = rollout_of(lengths, first), torch.tensor(counts)
    owner = plain.scores.repeat_interleave(each)
    images = torch.stack([owner, torch.arange(owner.numel()) + 0.5 + first], 1)
    return WithImages(**vars(plain) | {"image_counts": each, "images": images})


def images_of(rollout: WithImages) -> list[list[list[float]]]:
    """Returns the images by sample."""
    assert rollout.image_counts is not None and rollout.images is not None
    return [part.tolist() for part in rollout.images.split(rollout.image_counts.tolist())]


some_images = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=50)
@given(some_images, some_images, st.data())
def test_a_new_field_of_a_new_unit_goes_where_its_samples_go(
    a: list[tuple[int, int, int]], b: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    parts = [
        with_images([each[:2] for each in some], [each[2] for each in some], 100 * i) for i, some in enumerate((a, b))
    ]
    joined = parts[0].join(parts[1])
    assert images_of(joined) == [images for part in parts for images in images_of(part)]
    chosen = data.draw(st.lists(st.integers(0, len(a) + len(b) - 1), min_size=1, max_size=9))  # also repeated ones
    picked = joined.pick(torch.tensor(chosen))
    assert images_of(picked) == [images_of(joined)[i] for i in chosen]
    assert samples(picked) == [samples(joined)[i] for i in chosen]


def test_a_batch_without_pictures_has_none_when_it_is_cut_or_joined() -> None:
    plain = WithImages(**vars(rollout_of([(1, 2), (3, 1)])))
    assert plain.pick(torch.tensor([1])).images is None and plain.join(plain).images is None


def test_every_field_of_a_rollout_says_its_unit_or_is_no_tensor() -> None:
    assert {field.name for field in fields(Rollout)} - set(units.declared(Rollout)) == {"step", "source_names"}


@dataclass(frozen=True)
class Untold:
    step: int
    values: Tensor | None = None


def test_a_tensor_that_does_not_say_its_unit_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Untold\.values is a tensor without a declared unit of its items"):
        units.declared(Untold)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "log-probs": (
        lambda: replace(rollout_of([(1, 2), (3, 1)]), rollout_log_probs=torch.zeros(2)),
        r"rollout_log_probs has shape \[2\], but there are 3 response tokens",
    ),
    "tokens": (
        lambda: replace(rollout_of([(1, 2)]), tokens=torch.zeros(4)),
        r"tokens has shape \[4\], but there are 3 tokens",
    ),
    "scores": (
        lambda: replace(rollout_of([(1, 2)]), greedy_scores=torch.tensor(1.0)),
        r"greedy_scores has shape \[\], but there are 1 samples",
    ),
    "prompts": (
        lambda: replace(rollout_of([(1, 2)]), prompt_lens=torch.tensor([4])),
        "a prompt is longer than its sequence",
    ),
    "pictures": (
        lambda: replace(with_images([(1, 2)], [2]), image_counts=torch.tensor([1])),
        r"WithImages.images has shape \[2, 2\], but there are 1 images",
    ),
    "no counts": (
        lambda: replace(with_images([(1, 2)], [2]), image_counts=None),
        "image_counts is None: the number of images of each sample is unknown",
    ),
    "joined": (
        lambda: rollout_of([(1, 2)]).join(replace(rollout_of([(1, 2)]), rows=None)),
        r"Rollout\.rows: some of the batches to join have it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_rollout_that_does_not_fit_together_is_refused(name: str) -> None:
    make, says = WRONG[name]
    with pytest.raises(ValueError, match=says):
        make()


def test_no_list_goes_for_a_tensor_and_no_rollout_is_joined_with_another_kind() -> None:
    plain = rollout_of([(1, 2)])
    with pytest.raises(TypeError, match=r"Rollout\.rows must be a tensor, got list"):
        replace(plain, rows=[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot join batches of different types: Rollout, WithImages"):
        plain.join(with_images([(1, 2)], [0]))


@dataclass(frozen=True)
class WithTurns(Rollout):
    """A user-defined unit whose numbers are valid in this rollout only."""

    turn_counts: PerSample | None = None
    turns: Annotated[Tensor, Unit("turn", "turn_counts"), NUMBERING] | None = None


@dataclass(frozen=True)
class Learnt:
    rollout: WithTurns
    values: PerResponseToken
    name: str


def test_units_of_ones_own_and_a_batch_in_a_batch() -> None:
    def learnt(counts: list[int], name: str) -> Learnt:
        plain = rollout_of([(1, 2)] * len(counts))
        turns = WithTurns(**vars(plain), turn_counts=torch.tensor(counts), turns=torch.arange(sum(counts)))
        return Learnt(turns, plain.rollout_log_probs, name)

    joined = units.join([learnt([2, 0, 1], "a"), learnt([3], "b")])
    assert joined.rollout.turns is not None and joined.rollout.turns.tolist() == [0, 1, 2, 3, 4, 5]
    assert joined.values.tolist() == [0, -1, -2, -3, -4, -5, 0, -1] and joined.name == "a"
    picked = units.pick(joined, torch.tensor([3, 0]), of=joined.rollout)
    assert picked.rollout.turns is not None and picked.rollout.turns.tolist() == [3, 4, 5, 0, 1]
    assert picked.rollout.turn_counts is not None and picked.rollout.turn_counts.tolist() == [3, 2]
    assert picked.values.tolist() == [0, -1, 0, -1]


def test_token_ids_become_a_rollout() -> None:
    made = Rollout.of(3, [(1, 2), (7,)], [[3], [8, 9]], rows=torch.tensor([5, 6]))
    assert made.step == 3 and made.tokens.tolist() == [1, 2, 3, 7, 8, 9] and made.tokens.dtype == torch.int64
    assert made.prompt_lens.tolist() == [2, 1] and made.response_lens.tolist() == [1, 2]
    assert made.group.tolist() == [0, 1] and made.rows is not None and made.rows.tolist() == [5, 6]
    assert made.scores.tolist() == [0, 0] and made.rollout_log_probs.tolist() == [0, 0, 0]
    assert made.weight_versions is None
