"""`mrl data` of diffusion models: number of rows, prompts, and readability of pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mrl.config.trainers.diffusion import DiffusionConfig, DiffusionSFTConfig
from mrl.diffusion.prompts import PromptRows

SHOWN_CLASSES = 10


def preview(cfg: DiffusionConfig, samples: int) -> Iterator[str]:
    """Yields lines for a terminal. Raises DataError for an unusable row.

    Every row is read; for denoising, also the pictures of the first `samples` rows.
    """
    rows = PromptRows(cfg.data, cfg.run.seed)
    found = list(rows.all())
    texts, classes = {row.text for _, row in found}, Counter(row.label for _, row in found if row.label is not None)
    yield f"data.train  {', '.join(source.path for source in cfg.data.train)}"
    yield f"rows        {len(found)}, {len(texts)} different prompts"
    if classes:
        shown = ", ".join(f"{label}: {count}" for label, count in sorted(classes.items())[:SHOWN_CLASSES])
        yield f"classes     {len(classes)} ({shown}{', ...' * (len(classes) > SHOWN_CLASSES)})"
    yield ""
    yield "The run's first rows"
    for source, row in rows.of_step(0, samples):
        picture = ""
        if isinstance(cfg, DiffusionSFTConfig):
            picture = f"  {rows.picture_size(source, row)}"
        yield f"  {row.text!r}" + (f", class {row.label}" if row.label is not None else "") + picture
