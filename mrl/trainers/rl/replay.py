"""Samples of earlier steps, to be learnt from again beside the new ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrl import units
from mrl.config.schema import ReplayConfig
from mrl.core import Rollout
from mrl.inference.seeds import sample_seed
from mrl.trainers.shared.world import World
from mrl.units import PerResponseToken, PerSample

STREAM = 1 << 42  # keeps these draws apart from the seeds of samples


@dataclass(frozen=True)
class Reused:
    """The samples of a rollout that are from earlier steps.

    samples [B] bool, tokens [R] bool: those of earlier steps
    old_log_probs [R]: of these tokens, under the policy that drew them; 0 elsewhere
    """

    samples: PerSample
    tokens: PerResponseToken
    old_log_probs: PerResponseToken


@dataclass(frozen=True)
class _Step:
    """Remaining samples of a step, with their log-probs [R] under the policy that generated them."""

    rollout: Rollout
    old_log_probs: PerResponseToken

    def __post_init__(self) -> None:
        units.check(self, self.rollout)

    @classmethod
    def restored(cls, rollout: dict[str, Any], old_log_probs: Tensor) -> _Step:
        """Returns the step of a `state_dict`. Before states had weight_versions, the weights were always those of the
        step; before they had sequences, a trajectory was one."""
        known = {"weight_versions": torch.full_like(rollout["group"], rollout["step"])} | rollout
        if known.get("drawn") is not None and known.get("sequence_counts") is None:
            known |= {"sequence_counts": torch.ones_like(known["seq_lens"]), "sequence_lens": known["seq_lens"]}
        return cls(Rollout.from_state_dict(known), old_log_probs)

    @property
    def groups(self) -> Tensor:
        return self.rollout.group.unique()

    def of_groups(self, groups: Tensor) -> _Step:
        samples = torch.isin(self.rollout.group, groups).nonzero().flatten()
        return units.pick(self, samples, of=self.rollout)


class ReplayBuffer:
    """Groups of samples, at most `cfg.buffer_prompts` of them: the oldest go first. What is drawn follows from (seed,
    step) and from what is there."""

    def __init__(self, cfg: ReplayConfig, seed: int) -> None:
        self._cfg, self._seed = cfg, seed
        self._steps: list[_Step] = []  # oldest first

    def __len__(self) -> int:
        return sum(step.groups.numel() for step in self._steps)

    def add(self, rollout: Rollout, old_log_probs: Tensor) -> None:
        """old_log_probs [R]: under the policy that drew the samples."""
        self._steps.append(_Step(rollout, old_log_probs))
        while (surplus := len(self) - self._cfg.buffer_prompts) > 0:
            oldest = self._steps.pop(0)
            if (left := oldest.groups[surplus:]).numel():
                self._steps.insert(0, oldest.of_groups(left))

    def draw(self, step: int) -> tuple[Rollout, Tensor, float] | None:
        """`cfg.prompts_per_step` different groups for step `step` (from 0), their old log-probs [R], and their mean age
        in steps; None while there are fewer."""
        if self._cfg.max_age_steps is not None:
            self._steps = [s for s in self._steps if step - s.rollout.step <= self._cfg.max_age_steps]
        wanted = self._cfg.prompts_per_step
        if len(self) < wanted:
            return None
        chosen = _order(len(self), self._seed, step, 0)[:wanted]
        parts, first, age = [], 0, 0
        for kept in self._steps:
            inside = chosen[(chosen >= first) & (chosen < first + kept.groups.numel())] - first
            if inside.numel():
                parts.append(kept.of_groups(kept.groups[inside]))
                age += inside.numel() * (step - kept.rollout.step)
            first += kept.groups.numel()
        drawn = units.join(parts)
        return drawn.rollout, drawn.old_log_probs, age / wanted

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, which are never changed in place."""
        return {"steps": [{"rollout": s.rollout.state_dict(), "old_log_probs": s.old_log_probs} for s in self._steps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = [_Step.restored(**step) for step in state["steps"]]


class Replay:
    """A run's buffer: on rank 0, in host memory."""

    def __init__(self, cfg: ReplayConfig, seed: int, world: World) -> None:
        self.buffer = ReplayBuffer(cfg, seed)
        self._seed, self._world = seed, world

    def mix(self, new: Rollout) -> tuple[Rollout, Reused | None, dict[str, float]]:
        """The step's new samples with the drawn ones among them, the same on every rank, and metrics. Groups are in a
        random order, so that no mini-batch is of old samples alone. Collective."""
        drawn = self._world.from_main("drawing from the replay buffer", lambda: self.buffer.draw(new.step))
        if drawn is None:
            return new, None, {"replay/samples": 0.0}
        old, old_log_probs, age = drawn
        joined = new.join(old)
        places = _order(int(joined.group.max()) + 1, self._seed, new.step, 1)
        order = torch.argsort(places[joined.group], stable=True)
        mixed, is_old = joined.pick(order), order >= new.num_samples
        reused = Reused(
            samples=is_old,
            tokens=is_old.repeat_interleave(mixed.response_lens),
            old_log_probs=joined.flat_of(order, torch.cat([torch.zeros(new.num_response_tokens), old_log_probs])),
        )
        return mixed, reused, {"replay/samples": float(old.num_samples), "replay/age_steps": age}

    def keep(self, mixed: Rollout, reused: Reused | None, old_log_probs: Tensor) -> None:
        """Takes the new samples of what `mix` gave. old_log_probs [R]: of all its tokens; the new ones' are kept."""
        if not self._world.is_main:
            return
        if reused is None:
            self.buffer.add(mixed, old_log_probs)
        else:
            new = (~reused.samples).nonzero().flatten()
            self.buffer.add(mixed.pick(new), mixed.flat_of(new, old_log_probs))


def _order(count: int, seed: int, step: int, use: int) -> Tensor:
    """Returns a permutation that depends only on the arguments."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(sample_seed(seed, STREAM + step, use)))
