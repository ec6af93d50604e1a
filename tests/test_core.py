"""A step's samples as flat tensors: some of them, and those of several steps together."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.core import Rollout

Lengths = list[tuple[int, int]]  # prompt, response tokens of each sample
some_lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=8)


def rollout_of(lengths: Lengths, first: int = 0) -> Rollout:
    """Every token and log-prob is another number, from `first` on; two samples a group."""
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
    """Each sample by itself, cut out of the flat tensors by their plain definition."""
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
