"""Preview of a preference learning run's data, for `mrl data`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mrl.config.schema import PreferencesConfig
from mrl.data.histogram import histogram, shortened_text
from mrl.data.image_preview import image_line, image_summary, write_contact_sheet
from mrl.data.open_data import open_preferences
from mrl.data.preference import PreferenceDataset, noun, preference_notes
from mrl.data.preference_source import Preference


def preview_preferences(cfg: PreferencesConfig, samples: int, sheet: Path | None = None) -> Iterator[str]:
    """Yields lines of text: notes, sources, lengths of all responses, the run's first rows. sheet: file for the contact
    sheet of these rows' images. Raises the errors that the run would raise.
    """
    sets = open_preferences(cfg)
    for key, data in sets.items():
        yield from preference_notes(key, data)
    for key, data in sets.items():
        drawn = cfg.run.steps * cfg.batch.rows_per_step if key == "data.train" else None
        most = cfg.validation.rows if drawn is None else None
        first = f"; validation uses the first {most} (validation.rows)" if most and most < len(data) else ""
        yield f"\n{key}: {len(data)} {noun(data.form)}{first}"
        head = f"{'epochs':>8}" if drawn is not None else ""
        yield f"  {'share':>6} {'rows':>9} {'left out':>9} {'truncated':>9} {'merged':>9} {head}  source"
        for source, share in zip(data.sources, data.mixture.shares.tolist(), strict=True):
            counts = f"{share:6.1%} {len(source.rows):9} {source.num_dropped:9} {source.cut:9} {source.merged:9}"
            epochs = f"{drawn * share / len(source):8.2f}" if drawn is not None else ""
            yield f"  {counts} {epochs}  {source.name}"
        yield from _lengths(data)
        if data.image_processor is not None:
            grids = [grid for row in data.rows for grid in row.grids]
            tokens = sum(len(row.prompt) + sum(map(len, row.responses)) for row in data.rows)
            yield image_summary(grids, tokens, data.image_processor)
    data = sets["data.train"]
    image_processor = data.image_processor
    shown = data.of_step(0, samples, cfg.run.seed)
    yield f"\nthe run's first {len(shown)} {noun(data.form)}"
    for number in shown:
        yield from _row(data, data.rows[number])
        yield from (
            image_line(grid, image_processor) for grid in data.rows[number].grids if image_processor is not None
        )
    if sheet is not None:
        yield write_contact_sheet(
            {data.rows[number].index: data.pictures(data.rows[number]) for number in shown}, sheet
        )


def _lengths(data: PreferenceDataset) -> Iterator[str]:
    yield from histogram(np.array([len(row.prompt) for row in data.rows]), "prompt")
    parts: dict[str, list[int]] = {}
    for row in data.rows:
        for name, ids in zip(_names(data, row), row.responses, strict=True):
            parts.setdefault(name if data.form in ("pairs", "labels") else "responses", []).append(len(ids))
    for name, lengths in parts.items():
        yield from histogram(np.array(lengths), name)
    if data.form == "labels":
        good = sum(bool(row.scores[0]) for row in data.rows)
        yield f"  labels: {good} true, {len(data) - good} false"
    if data.form == "scores":
        scores = np.array([row.scores[0] for row in data.rows])
        yield f"  scores: {scores.min():g} to {scores.max():g}, {scores.mean():.4g} on average"
    if data.form == "steps":
        of_steps = np.array([score for row in data.rows for score in row.scores])
        yield f"  steps: {of_steps.sum():g} good of {len(of_steps)}"
    if any(row.margin is not None for row in data.rows):
        margins = np.array([row.margin for row in data.rows], dtype=float)
        yield f"  margins: {margins.min():g} to {margins.max():g}, {margins.mean():.4g} on average"


def _row(data: PreferenceDataset, row: Preference) -> Iterator[str]:
    source = f", {data.cfg.data_source_key} {row.source}" if row.source is not None else ""
    margin = f", margin {row.margin:g}" if row.margin is not None else ""
    yield f"\n--- {data.where(row)}: {len(row.prompt)} tokens{source}{margin}"
    prompt = row.prompt.tolist()
    if data.image_processor is not None:
        prompt = data.image_processor.collapse_image_tokens(prompt, row.grids)
    yield shortened_text(data.tokenizer.decode(prompt, special=True))
    for name, ids, is_cut in zip(_names(data, row), row.responses, row.cut, strict=True):
        yield f"--> {name}: {len(ids)} tokens{', truncated' if is_cut else ''}"
        yield shortened_text(data.tokenizer.decode(ids.tolist(), special=True))


def _names(data: PreferenceDataset, row: Preference) -> tuple[str, ...]:
    """Returns the names of a row's responses."""
    if data.form == "labels":
        return (f"completion, label {'true' if row.scores[0] else 'false'}",)
    if data.form == "lists":
        return tuple(f"better than {score:g}" for score in row.scores)
    if data.form == "scores":
        return (f"completion, score {row.scores[0]:g}",)
    if data.form == "steps":
        return (f"solution, steps {' '.join('good' if score else 'bad' for score in row.scores)}",)
    return ("chosen", "rejected")
