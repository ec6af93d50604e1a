"""Preview of a run's data, for `mrl data`: its sources, lengths, and its first prompts after templating."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np

from mrl.config.schema import Config, PreferencesConfig, RLConfig, SFTConfig
from mrl.core import Prompt
from mrl.data.dataset import PromptDataset, data_notes
from mrl.data.histogram import histogram, shortened_text
from mrl.data.image_preview import image_line, image_summary, write_contact_sheet
from mrl.data.open_data import open_prompts
from mrl.data.preference_preview import preview_preferences
from mrl.data.rows import RowCheck
from mrl.data.sft_preview import preview_sft

BATCH_PROMPTS = 1024


def preview(cfg: Config, samples: int, check: RowCheck | None = None, sheet: Path | None = None) -> Iterator[str]:
    """Yields lines of text. Reads and tokenises everything as the run would, and raises the errors that the run would
    raise.

    check: demands of the reward on a row; sheet: file for the contact sheet of the images of the rows that are shown
    """
    if isinstance(cfg, PreferencesConfig):
        yield from preview_preferences(cfg, samples, sheet)
        return
    if cfg.imitated() is not None:
        yield from preview_sft(cast(SFTConfig, cfg), samples)
        return
    uses, sets = cfg.data_uses(), open_prompts(cfg, check)
    train = sets["data.train"]
    for key, other in uses.items():
        if key != "data":
            sets[f"{key}.train"] = PromptDataset(other.cfg.train, other.cfg, train.tokenizer, not other.is_sampled)
    yield from data_notes(train.tokenizer, sets)
    for key, data in sets.items():
        of = uses[key.removesuffix(".train").removesuffix(".validation")]
        drawn = cfg.run.steps * of.rows_per_step if key.endswith(".train") else None
        with_answers = drawn is not None and not of.is_sampled
        most = cast(RLConfig, cfg).validation.prompts if cfg.is_sampling and drawn is None else None
        first = f"; validation uses the first {most} (validation.prompts)" if most and most < len(data) else ""
        yield f"\n{key}: {len(data)} prompts{first}"
        yield from _sources(data, drawn)
        yield from histogram(_lengths(data, with_answers), "prompt, answer and EOS" if with_answers else "prompt")
        if data.image_processor is not None:
            grids = [grid for source in data.sources for grid in source.grids]
            yield image_summary(
                grids, sum(int(source.token_counts.sum()) for source in data.sources), data.image_processor
            )
    shown, image_processor = train.prompts_for_step(0, samples, cfg.run.seed), train.image_processor
    yield f"\nthe run's first {len(shown)} prompts"
    for prompt in shown:
        yield from _sample(prompt, train, not uses["data"].is_sampled)
        yield from (
            image_line(shape[:2], image_processor) for shape in prompt.images or () if image_processor is not None
        )
    if sheet is not None:
        yield write_contact_sheet({prompt.index: prompt.pictures for prompt in shown}, sheet)


def _sources(data: PromptDataset, drawn: int | None) -> Iterator[str]:
    """Yields a line for each source. `drawn`: prompts that the run takes; None for a data set without epochs."""
    epochs = f"{'epochs':>8}" if drawn is not None else ""
    yield f"  {'share':>6} {'rows':>9} {'left out':>9} {'truncated':>9} {'longest':>9} {epochs}  source"
    for source, share in zip(data.sources, data.mixture.shares.tolist(), strict=True):
        counts = f"{share:6.1%} {len(source.rows):9} {source.dropped:9} {source.cut:9} {source.longest:9}"
        epochs = f"{drawn * share / len(source):8.2f}" if drawn is not None else ""
        yield f"  {counts} {epochs}  {source.name}"


def _lengths(data: PromptDataset, with_answers: bool) -> np.ndarray:
    """Returns the tokens of each prompt, or of each whole row of supervised fine-tuning, [P]."""
    prompts = np.concatenate([source.token_counts for source in data.sources])
    if not with_answers:
        return prompts
    answers: list[int] = []
    for source in data.sources:
        for start in range(0, len(source), BATCH_PROMPTS):
            batch = [source.prompt(i) for i in range(start, min(start + BATCH_PROMPTS, len(source)))]
            answers += map(len, data.answers(batch))
    return prompts + np.asarray(answers)


def _sample(prompt: Prompt, data: PromptDataset, with_answer: bool) -> Iterator[str]:
    name = prompt.row.get(data.cfg.data_source_key)
    source = f", {data.cfg.data_source_key} {name}" if name is not None else ""
    yield f"\n--- {data.where(prompt)}: {len(prompt.token_ids)} tokens{source}"
    yield shortened_text(data.tokenizer.decode(prompt.text_token_ids, special=True))
    answer = prompt.row.get(data.cfg.answer_key)
    if with_answer:
        [ids] = data.answers([prompt])
        yield f"--> {len(ids)} tokens, including EOS"
        yield shortened_text(str(answer))
    elif answer is not None:
        yield f"--> {data.cfg.answer_key}: {shortened_text(str(answer))}"
