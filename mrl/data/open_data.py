"""The rows of a run: its trainer and `mrl data` open them here, so that both get the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mrl.config.schema import Config, PreferencesConfig, SFTConfig
from mrl.data.dataset import PromptDataset
from mrl.data.image_prompts import load_image_processor
from mrl.data.packed_rows import PackedRows
from mrl.data.preference import PreferenceDataset
from mrl.data.rows import RowCheck, train_check
from mrl.data.sft import SFTDataset, sft_notes
from mrl.data.tokenizer import load_tokenizer
from mrl.data.wrapped_rows import WrappedRows


def open_prompts(cfg: Config, check: RowCheck | None = None) -> dict[str, PromptDataset]:
    """Reads prompts, by the key of their sources, with answers if the run samples no responses.

    Args:
        check: demands of the reward on a row.

    Raises:
        DataError, TokenizerError: for unusable data or tokenizers.
    """
    use, found = cfg.data_uses()["data"], dict[str, PromptDataset]()
    tokenizer = load_tokenizer(cfg.model.path, cfg.model.eos_token, cfg.model.chat_template)
    image_processor = load_image_processor(cfg.model.path, use.cfg) if cfg.sees_pictures else None
    for key, sources in (("data.train", use.cfg.train), ("data.validation", use.cfg.validation)):
        if sources is not None:
            before = sum(len(source.rows) for data in found.values() for source in data.sources)
            has_answers = key == "data.train" and not use.is_sampled
            own = train_check(use, check) if key == "data.train" else check
            found[key] = PromptDataset(sources, use.cfg, tokenizer, has_answers, own, image_processor, before)
    return found


def open_preferences(cfg: PreferencesConfig) -> dict[str, PreferenceDataset]:
    """Reads the training set and the held-out set, by the key of their sources. Raises as `open_prompts`."""
    use, found = cfg.data_uses()["data"], dict[str, PreferenceDataset]()
    assert use.preferences is not None
    tokenizer = load_tokenizer(cfg.model.path, cfg.model.eos_token, cfg.model.chat_template)
    image_processor, rows = load_image_processor(cfg.model.path, cfg.data), 0
    for key, sources in (("data.train", cfg.data.train), ("data.validation", cfg.data.validation)):
        if sources is not None:
            found[key] = PreferenceDataset(
                sources, cfg.data, tokenizer, use.preferences, use.margins, use.cuts, image_processor, rows
            )
            rows += sum(len(source.rows) for source in found[key].sources)
    return found


@dataclass(frozen=True)
class SFTDatasets:
    """Rows of a run of supervised fine-tuning.

    packed: the packed rows that a step takes; None: a step takes the rows of `train`
    """

    train: SFTDataset
    held_out: SFTDataset | None
    packed: PackedRows | WrappedRows | None

    def __len__(self) -> int:
        """Returns the length of an epoch in the unit of `batch.samples_per_step`."""
        return len(self.train if self.packed is None else self.packed)

    @property
    def unit(self) -> str:
        """Unit that `batch.samples_per_step` counts."""
        return "rows" if not isinstance(self.packed, PackedRows) else "packs"

    def notes(self) -> Iterator[str]:
        """Yields a sentence for each correction of the rows: dropped, truncated or packed."""
        yield from self.train.tokenizer.notes
        if self.train.cfg.chat_template:
            yield from self.train.tokenizer.turn_notes()
        yield from sft_notes("data.train", self.train)
        if self.held_out is not None:
            yield from sft_notes("data.validation", self.held_out)
        if self.packed is not None:
            yield from self.packed.notes()


def open_sft(cfg: SFTConfig) -> tuple[SFTDatasets, SFTConfig]:
    """Reads the rows; returns them and the configuration with its number of steps. Raises as `open_prompts`."""
    tokenizer = load_tokenizer(cfg.model.path, cfg.model.eos_token, cfg.model.chat_template)
    data, validation = cfg.imitated(), cfg.data.validation
    train = SFTDataset(data.train, data, tokenizer)
    held_out = SFTDataset(validation, data, tokenizer) if validation is not None else None
    packed: PackedRows | WrappedRows | None = None
    if cfg.is_packed:
        packed = (WrappedRows if cfg.is_wrapped else PackedRows)(train, cfg.packing, cfg.run.seed)
    rows = SFTDatasets(train, held_out, packed)
    cfg = with_steps(cfg, len(rows))
    if isinstance(packed, WrappedRows):
        packed.require(cfg.run.steps * cfg.batch.samples_per_step)
    return rows, cfg


def with_steps(cfg: SFTConfig, rows: int) -> SFTConfig:
    """Returns the configuration with `run.steps` in place of `batch.epochs`, and with decay steps if the decay has none
    of its own. The last step may begin a further epoch.
    """
    if cfg.batch.epochs is None:
        return cfg
    steps = max(1, math.ceil(rows * cfg.batch.epochs / cfg.batch.samples_per_step))
    optimizer = cfg.actor.optimizer
    if optimizer.decay != "constant" and optimizer.decay_steps is None:
        optimizer = optimizer.model_copy(update={"decay_steps": max(steps, optimizer.warmup_steps + 1)})
    return cfg.model_copy(
        update={
            "run": cfg.run.model_copy(update={"steps": steps}),
            "batch": cfg.batch.model_copy(update={"epochs": None}),
            "actor": cfg.actor.model_copy(update={"optimizer": optimizer}),
        }
    )
