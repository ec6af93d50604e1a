"""Demonstrations that the actor learns from in every update, beside its own samples."""

from __future__ import annotations

from mrl.algo import aggregate
from mrl.config.schema import RLConfig
from mrl.config.trainers.rl import most_updates_per_step
from mrl.data import PromptDataset, data_notes, load_tokenizer
from mrl.learner import LossTerm, losses


class Demonstrations:
    """Demonstrations of the PTX loss. Those of an update depend only on (seed, step, update), so there is no state to
    save. Built on every rank."""

    def __init__(self, cfg: RLConfig) -> None:
        assert cfg.ptx is not None
        self._cfg, self._seed = cfg.ptx, cfg.run.seed
        self._updates = most_updates_per_step(cfg)
        tokenizer = load_tokenizer(cfg.model.path, cfg.model.eos_token, cfg.model.chat_template)
        self.data = PromptDataset(cfg.ptx.data.train, cfg.ptx.data, tokenizer, require_answer=True)
        notes = data_notes(tokenizer, {"ptx.data.train": self.data})
        self.notes = [note for note in notes if note not in tokenizer.notes]  # what was left out or cut

    def term(self, step: int, update: int) -> LossTerm:
        """Returns the loss term for one update of a step, both from 0."""
        count = self._cfg.samples_per_update
        batch = self.data.sft_rollout(step * self._updates + update, count, self._seed)
        weights = batch.flat(aggregate.token_weights("token-mean", batch.response_mask))
        return LossTerm(batch, range(count), losses.ptx(weights, self._cfg.coef), temperature=1.0)
