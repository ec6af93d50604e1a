"""Inputs of a model with a score head: its output before a response token is the score of the preceding text."""

from __future__ import annotations

from dataclasses import replace

import torch

from mrl.core import Rollout


def at_last_tokens(batch: Rollout) -> Rollout:
    """Returns each text with one more token, the only one in the action mask: the one output of each text is the score
    at its last token, [B]. Prompts stay unchanged: only their images are seen.
    """
    inputs = _with_one_more(batch)
    drawn = torch.zeros_like(inputs.tokens, dtype=torch.bool)
    drawn[inputs.seq_lens.cumsum(0) - 1] = True
    return replace(inputs, action_mask=drawn, rollout_log_probs=torch.zeros(inputs.num_samples))


def at_every_token(batch: Rollout) -> Rollout:
    """Returns each response with one more token: of the [n + 1] outputs of each response, the first is the score at the
    prompt's last token and the others are those at the response's tokens.
    """
    return _with_one_more(batch)


def _with_one_more(batch: Rollout) -> Rollout:
    """Repeats the last token of each text. Attention is causal, so the value of the added token does not matter."""
    twice = torch.ones_like(batch.tokens)
    twice[batch.seq_lens.cumsum(0) - 1] = 2
    return replace(
        batch,
        tokens=batch.tokens.repeat_interleave(twice),
        seq_lens=batch.seq_lens + 1,
        rollout_log_probs=torch.zeros(batch.num_response_tokens + batch.num_samples),
    )
