"""What a run would be fed with, for `mrl data`: its sources, lengths, and its first prompts after templating."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mrl.config.schema import Config, PreferenceDataConfig, SFTDataConfig
from mrl.core import Prompt
from mrl.data.dataset import PromptDataset, data_notes
from mrl.data.histogram import histogram, shortened_text
from mrl.data.image_prompts import load_eyes
from mrl.data.picture_preview import all_pictures, on_sheet, one_picture
from mrl.data.preference_preview import preview_preferences
from mrl.data.rows import RowCheck
from mrl.data.sft_preview import preview_imitated
from mrl.data.tokenizer import load_tokenizer

BATCH_PROMPTS = 1024


def preview(cfg: Config, samples: int, check: RowCheck | None = None, sheet: Path | None = None) -> Iterator[str]:
    """Lines of text. Reads and tokenises everything, as the run would; raises what the run would raise.

    check: what the reward demands of a row; sheet: the pictures of the rows that are shown are written there
    """
    use = cfg.data_uses()["data"]
    if isinstance(use.cfg, PreferenceDataConfig) and use.preferences is not None:
        yield from preview_preferences(cfg, use, use.cfg, samples, sheet)
        return
    if isinstance(use.cfg, SFTDataConfig):
        yield from preview_imitated(cfg, use.cfg, samples)
        return
    has_answers = not use.is_sampled
    tokenizer = load_tokenizer(cfg.model.path, cfg.model.eos_token, cfg.model.chat_template)
    eyes = load_eyes(cfg.model.path, cfg.data) if cfg.sees_pictures else None
    sets = {"data.train": PromptDataset(cfg.data.train, cfg.data, tokenizer, has_answers, check, eyes)}
    if cfg.data.validation is not None:
        sets["data.validation"] = PromptDataset(cfg.data.validation, cfg.data, tokenizer, check=check, eyes=eyes)
    yield from data_notes(tokenizer, sets)
    drawn = cfg.run.steps * use.rows_per_step
    for key, data in sets.items():
        yield f"\n{key}: {len(data)} prompts"
        yield from _sources(data, drawn if key == "data.train" else None)
        yield from histogram(_lengths(data, has_answers), "prompt, answer and EOS" if has_answers else "prompt")
        if eyes is not None:
            grids = [grid for source in data.sources for grid in source.grids]
            yield all_pictures(grids, sum(int(source.token_counts.sum()) for source in data.sources), eyes)
    train = sets["data.train"]
    shown = train.prompts_for_step(0, samples, cfg.run.seed)
    yield f"\nthe run's first {len(shown)} prompts"
    for prompt in shown:
        yield from _sample(prompt, train, has_answers)
        yield from (one_picture(shape[:2], eyes) for shape in prompt.images or () if eyes is not None)
    if sheet is not None:
        yield on_sheet({prompt.index: prompt.pictures for prompt in shown}, sheet)


def _sources(data: PromptDataset, drawn: int | None) -> Iterator[str]:
    """A line each. `drawn`: prompts that the run takes; None: of no use here."""
    epochs = f"{'epochs':>8}" if drawn is not None else ""
    yield f"  {'share':>6} {'rows':>9} {'left out':>9} {'cut':>9} {'longest':>9} {epochs}  source"
    for source, share in zip(data.sources, data.mixture.shares.tolist(), strict=True):
        counts = f"{share:6.1%} {len(source.rows):9} {source.dropped:9} {source.cut:9} {source.longest:9}"
        epochs = f"{drawn * share / len(source):8.2f}" if drawn is not None else ""
        yield f"  {counts} {epochs}  {source.name}"


def _lengths(data: PromptDataset, with_answers: bool) -> np.ndarray:
    """[P] tokens of each prompt, or of what supervised fine-tuning makes of its row."""
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
    yield shortened_text(prompt.text)
    answer = prompt.row.get(data.cfg.answer_key)
    if with_answer:
        [ids] = data.answers([prompt])
        yield f"--> {len(ids)} tokens, EOS included"
        yield shortened_text(str(answer))
    elif answer is not None:
        yield f"--> {data.cfg.answer_key}: {shortened_text(str(answer))}"
