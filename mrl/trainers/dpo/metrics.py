"""Metrics of a preference-learning step, from the sums before its update. Names are TRL's where TRL has one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.algo.preference import log_odds_ratio
from mrl.data.preference_source import Preference
from mrl.learner.preference import PreferenceTargets


def of_step(t: PreferenceTargets, policy: Tensor, rows: Sequence[Preference]) -> dict[str, float]:
    """Returns means over the step's rows. policy [2, B] float64: sums as of `PreferenceTargets.sums`; rows: the rows of
    the sums."""
    found = {f"dpo/loss_by_type/{name}": float(values.mean()) for name, values in t.by_loss(policy).items()}
    found["dpo/cut_share"] = sum(row.is_cut for row in rows) / len(rows)
    for name, labels in (("chosen", t.labels), ("rejected", ~t.labels)):
        if labels.any():
            found[f"logps/{name}"] = float(policy[0, labels].mean())
            found[f"dpo/length_{name}"] = float(t.tokens[labels].mean())
    if t.labels.any():
        found["nll_loss"] = -float(policy[1].sum() / t.text_tokens)
    if (rewards := rewards_of(t, policy[0])) is not None:
        found |= _of_rewards(t, rewards)
        if t.together == 2:
            found |= _accuracies(t, rewards, rows)
    if "orpo" in t.losses:
        odds = log_odds_ratio(t.pairs(policy))
        found |= {
            "log_odds_chosen": float(odds.mean()),
            "log_odds_ratio": float(torch.nn.functional.logsigmoid(odds).mean()),
        }
    if "kto" in t.losses:
        found["kl"] = float(t.kl)
    if "bco" in t.losses:
        found["dpo/shift"] = t.shift
    return {name if "/" in name else f"dpo/{name}": value for name, value in found.items()}


def rewards_of(t: PreferenceTargets, policy: Tensor) -> Tensor | None:
    """Returns the implicit rewards [B]: beta times the log-ratios, per token if the loss uses means.

    The first loss with a beta counts; None if no loss has one.
    """
    for options in t.losses.values():
        beta = dict(options).get("beta")
        if beta is not None:
            ratios = policy - t.reference
            return beta * (ratios / t.tokens if options.rewards_of_means else ratios)
    return None


def _of_rewards(t: PreferenceTargets, rewards: Tensor) -> dict[str, float]:
    found = {
        f"rewards/{name}": float(rewards[labels].mean())
        for name, labels in (("chosen", t.labels), ("rejected", ~t.labels))
        if labels.any()
    }
    if len(found) == 2:
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found


def _accuracies(t: PreferenceTargets, rewards: Tensor, rows: Sequence[Preference]) -> dict[str, float]:
    """Share of pairs whose chosen response has the higher reward; a tie is wrong. Also by data source, and by whether
    the chosen response is longer or shorter."""
    right = (rewards[0::2] > rewards[1::2]).double()
    longer = t.tokens[0::2] - t.tokens[1::2]
    groups = {"chosen_longer": longer > 0, "chosen_shorter": longer < 0}
    for source in sorted({row.source for row in rows if row.source is not None}):
        groups[f"source/{source}"] = torch.tensor([row.source == source for row in rows])
    found = {f"rewards/accuracies/{name}": float(right[which].mean()) for name, which in groups.items() if which.any()}
    return {"rewards/accuracies": float(right.mean()), **found}
