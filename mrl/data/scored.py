"""Texts as a model with a score head is fed them: its output before a response token is the score of what precedes."""

from __future__ import annotations

from dataclasses import replace

import torch

from mrl.core import Rollout


def at_last_tokens(batch: Rollout) -> Rollout:
    """Each text with one more token, which alone is drawn: the one output of each is the score at the text's last
    token, [B]. Prompts stay what they are: of these alone the pictures are seen."""
    fed = _with_one_more(batch)
    drawn = torch.zeros_like(fed.tokens, dtype=torch.bool)
    drawn[fed.seq_lens.cumsum(0) - 1] = True
    return replace(fed, drawn=drawn, rollout_log_probs=torch.zeros(fed.num_samples))


def at_every_token(batch: Rollout) -> Rollout:
    """Each response with one more token: [n + 1] outputs of each, of which the first is the score at the prompt's last
    token and the others are those at the response's."""
    return _with_one_more(batch)


def _with_one_more(batch: Rollout) -> Rollout:
    """Attention is causal: what the token is does not matter. It is the last one again."""
    twice = torch.ones_like(batch.tokens)
    twice[batch.seq_lens.cumsum(0) - 1] = 2
    return replace(
        batch,
        tokens=batch.tokens.repeat_interleave(twice),
        seq_lens=batch.seq_lens + 1,
        rollout_log_probs=torch.zeros(batch.num_response_tokens + batch.num_samples),
    )
