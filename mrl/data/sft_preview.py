"""Preview of a supervised fine-tuning run's data, for `mrl data`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mrl.config.schema import SFTConfig
from mrl.data.histogram import histogram, shortened_text
from mrl.data.open_data import open_sft
from mrl.data.packed_rows import PackedRows
from mrl.data.sft import SFTDataset
from mrl.data.sft_source import SFTExample
from mrl.data.wrapped_rows import WrappedRows


def preview_sft(cfg: SFTConfig, samples: int) -> Iterator[str]:
    """Yields lines of text: the run's own notes, sources, lengths, the first rows with their trained tokens. Raises the
    errors that the run would raise.
    """
    rows, cfg = open_sft(cfg)
    yield from rows.notes()
    train, form = rows.train, rows.train.cfg.form
    noun = {"answers": "prompts", "messages": "conversations", "text": "texts"}[form]
    epochs = cfg.run.steps * cfg.batch.samples_per_step / len(rows)
    for key, data in (("data.train", train), ("data.validation", rows.held_out)):
        if data is None:
            continue
        most = cfg.validation.rows if data is not train else None
        first = f"; validation uses the first {most} (validation.rows)" if most and most < len(data) else ""
        yield f"\n{key}: {len(data)} {noun}{first}"
        yield from _sources(data, epochs if data is train else None)
        what = "prompt, answer and EOS" if form == "answers" else noun
        yield from histogram(np.array([len(row.ids) for row in data.rows]), what)
        num_trained_tokens = rows.packed.rows() if data is train and isinstance(rows.packed, PackedRows) else data.rows
        if not (data is train and isinstance(rows.packed, WrappedRows)):
            yield from histogram(
                np.array([row.num_trained_tokens for row in num_trained_tokens]), "trained tokens of a row"
            )
    yield f"\n{cfg.run.steps} steps of {cfg.batch.samples_per_step} {rows.unit}, {epochs:.2f} epochs"
    if isinstance(rows.packed, WrappedRows):
        shown = list(map(rows.packed.row, range(samples)))
        yield f"\nthe run's first {len(shown)} rows; all tokens but the first are trained"
        for ids in shown:
            yield f"\n--- {len(ids)} tokens"
            yield shortened_text(train.tokenizer.decode(ids.tolist(), special=True))
        return
    first_rows = [train.rows[number] for number in train.of_step(0, samples, cfg.run.seed)]
    if rows.packed is not None:
        first_rows = rows.packed.pack(0)[:samples]
    yield f"\nthe run's first {len(first_rows)} {noun}" + (" of its first pack" if rows.packed is not None else "")
    for row in first_rows:
        yield from _row(train, row)


def _sources(data: SFTDataset, epochs: float | None) -> Iterator[str]:
    """Yields a line for each source. epochs: of all sources together, that the run takes; None for held-out data."""
    head = f"{'epochs':>8}" if epochs is not None else ""
    yield f"  {'share':>6} {'rows':>9} {'left out':>9} {'truncated':>9} {'longest':>9} {head}  source"
    for source, share in zip(data.sources, data.mixture.shares.tolist(), strict=True):
        cut = source.cut + source.cut_prompt
        counts = f"{share:6.1%} {len(source.rows):9} {source.num_dropped:9} {cut:9} {source.longest:9}"
        own = f"{epochs * len(data) * share / len(source):8.2f}" if epochs is not None else ""
        yield f"  {counts} {own}  {source.name}"


def _row(data: SFTDataset, row: SFTExample) -> Iterator[str]:
    """Yields the row's parts in order; trained parts are marked."""
    source = f", {data.cfg.data_source_key} {row.source}" if row.source is not None else ""
    yield f"\n--- {data.where(row)}: {len(row.ids)} tokens{source}{', truncated' if row.is_cut else ''}"
    rest = np.ones(len(row.ids) - row.prompt, dtype=np.float32) if row.weights is None else row.weights
    counts = np.concatenate([np.zeros(row.prompt, dtype=np.float32), rest])
    ends = [*(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(counts)]
    for first, after in zip([0, *ends], ends, strict=False):
        count = float(counts[first])
        if count:
            weight, last = f", weight {count:g}" if count != 1 else "", int(row.ids[after - 1])
            end = f", including {data.tokenizer.hf.convert_ids_to_tokens(last)!r}" if last in data.end_tokens else ""
            eos = ", including EOS" if last == data.tokenizer.eos_id else end
            yield f"--> {after - first} tokens{eos}{weight}"
        yield shortened_text(data.tokenizer.decode(row.ids[first:after].tolist(), special=not count))
