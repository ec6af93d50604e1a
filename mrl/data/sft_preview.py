"""What a run that imitates would be fed with, for `mrl data`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mrl.config.schema import Config, SFTDataConfig
from mrl.data.histogram import histogram, shortened_text
from mrl.data.sft import SFTDataset, sft_notes
from mrl.data.sft_source import Example
from mrl.data.tokenizer import load_tokenizer


def preview_imitated(cfg: Config, data_cfg: SFTDataConfig, samples: int) -> Iterator[str]:
    """Lines of text: notes, sources, lengths, the run's first rows with what is learnt of them. Raises what the run
    would raise."""
    tokenizer = load_tokenizer(cfg.model.path, cfg.model.eos_token, cfg.model.chat_template)
    sets = {"data.train": SFTDataset(data_cfg.train, data_cfg, tokenizer)}
    if data_cfg.validation is not None:
        sets["data.validation"] = SFTDataset(data_cfg.validation, data_cfg, tokenizer)
    yield from tokenizer.notes
    if data_cfg.chat_template:
        yield from tokenizer.turn_notes()
    for key, data in sets.items():
        yield from sft_notes(key, data)
    noun = {"answers": "prompts", "messages": "conversations", "text": "texts"}[data_cfg.form]
    drawn = cfg.run.steps * cfg.data_uses()["data"].rows_per_step if not cfg.steps_follow_data() else None
    for key, data in sets.items():
        yield f"\n{key}: {len(data)} {noun}"
        yield from _sources(data, drawn if key == "data.train" else None)
        what = "prompt, answer and EOS" if data_cfg.form == "answers" else noun
        yield from histogram(np.array([len(row.ids) for row in data.rows]), what)
        yield from histogram(np.array([_learnt(row) for row in data.rows]), "what is learnt of a row")
    train = sets["data.train"]
    shown = train.of_step(0, samples, cfg.run.seed)
    yield f"\nthe run's first {len(shown)} {noun}"
    for number in shown:
        yield from _row(train, train.rows[number])


def _sources(data: SFTDataset, drawn: int | None) -> Iterator[str]:
    """A line each. drawn: rows that the run takes; None: of no use here."""
    epochs = f"{'epochs':>8}" if drawn is not None else ""
    yield f"  {'share':>6} {'rows':>9} {'left out':>9} {'cut':>9} {'longest':>9} {epochs}  source"
    for source, share in zip(data.sources, data.mixture.shares.tolist(), strict=True):
        cut = source.cut + source.cut_prompt
        counts = f"{share:6.1%} {len(source.rows):9} {source.left_out:9} {cut:9} {source.longest:9}"
        epochs = f"{drawn * share / len(source):8.2f}" if drawn is not None else ""
        yield f"  {counts} {epochs}  {source.name}"


def _learnt(row: Example) -> int:
    """Tokens that count."""
    return len(row.ids) - row.prompt if row.weights is None else int((row.weights > 0).sum())


def _row(data: SFTDataset, row: Example) -> Iterator[str]:
    """The row's parts in their order; those that are learnt are named."""
    source = f", {data.cfg.data_source_key} {row.source}" if row.source is not None else ""
    yield f"\n--- {data.where(row)}: {len(row.ids)} tokens{source}{', cut' if row.is_cut else ''}"
    rest = np.ones(len(row.ids) - row.prompt, dtype=np.float32) if row.weights is None else row.weights
    counts = np.concatenate([np.zeros(row.prompt, dtype=np.float32), rest])
    ends = [*(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(counts)]
    for first, after in zip([0, *ends], ends, strict=False):
        count = float(counts[first])
        if count:
            weight = f", each counts {count:g}" if count != 1 else ""
            eos = ", EOS included" if row.ids[after - 1] == data.tokenizer.eos_id else ""
            yield f"--> {after - first} tokens{eos}{weight}"
        yield shortened_text(data.tokenizer.decode(row.ids[first:after].tolist(), special=not count))
