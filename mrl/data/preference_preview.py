"""What a run of preference learning would be fed with, for `mrl data`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from mrl.config.schema import Config, PreferenceDataConfig
from mrl.data.histogram import histogram, shortened_text
from mrl.data.preference import PreferenceDataset, preference_notes
from mrl.data.preference_source import Preference
from mrl.data.tokenizer import load_tokenizer


def preview_preferences(
    cfg: Config, data_cfg: PreferenceDataConfig, form: Literal["pairs", "labels"], samples: int
) -> Iterator[str]:
    """Lines of text: notes, sources, lengths of both halves, the run's first rows. Raises what the run would raise."""
    tokenizer = load_tokenizer(cfg.model.path, cfg.model.eos_token)
    data = PreferenceDataset(data_cfg.train, data_cfg, tokenizer, form)
    yield from [*tokenizer.notes, *preference_notes("data.train", data)]
    drawn = cfg.run.steps * cfg.data_uses()["data"].rows_per_step
    yield f"\ndata.train: {len(data)} {_noun(form)}"
    yield f"  {'share':>6} {'rows':>9} {'left out':>9} {'cut':>9} {'merged':>9} {'epochs':>8}  source"
    for source, share in zip(data.sources, data.mixture.shares.tolist(), strict=True):
        counts = f"{share:6.1%} {len(source.rows):9} {source.left_out:9} {source.cut:9} {source.merged:9}"
        yield f"  {counts} {drawn * share / len(source):8.2f}  {source.name}"
    yield from histogram(np.array([len(row.prompt) for row in data.rows]), "prompt")
    for i, name in enumerate(_halves(form)):
        yield from histogram(np.array([len(row.responses[i]) for row in data.rows]), name)
    if form == "labels":
        good = sum(bool(row.label) for row in data.rows)
        yield f"  labels: {good} true, {len(data) - good} false"
    shown = data.of_step(0, samples, cfg.run.seed)
    yield f"\nthe run's first {len(shown)} {_noun(form)}"
    for number in shown:
        yield from _row(data, data.rows[number], form)


def _row(data: PreferenceDataset, row: Preference, form: Literal["pairs", "labels"]) -> Iterator[str]:
    source = f", {data.cfg.data_source_key} {row.source}" if row.source is not None else ""
    yield f"\n--- {data.where(row)}: {len(row.prompt)} tokens{source}"
    yield shortened_text(data.tokenizer.decode(row.prompt.tolist(), special=True))
    for name, ids in zip(_halves(form), row.responses, strict=True):
        label = f", label {str(row.label).lower()}" if row.label is not None else ""
        yield f"--> {name}: {len(ids)} tokens{label}{', cut' if row.is_cut else ''}"
        yield shortened_text(data.tokenizer.decode(ids.tolist(), special=True))


def _halves(form: Literal["pairs", "labels"]) -> tuple[str, ...]:
    return ("completion",) if form == "labels" else ("chosen", "rejected")


def _noun(form: Literal["pairs", "labels"]) -> str:
    return "responses with a label" if form == "labels" else "pairs"
