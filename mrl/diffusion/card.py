"""Model card (README.md) of an export, made from the files of its run."""

from __future__ import annotations

import shutil
from pathlib import Path

from mrl.cards.write import CARD, is_edited, sealed
from mrl.observe import read_metrics
from mrl.observe.files import read_config
from mrl.observe.metrics import Row
from mrl.observe.report import BY_PROMPT, first_curve, image_grids

GRID, CURVE = "images.png", "reward.png"


def card(run_dir: Path, export: Path, target: Path, step: int) -> None:
    """Writes README.md, the newest grid of images and the reward curve into `export`, which will become `target`.

    An edited card in `target` is kept. Raises UnreadableFile.
    """
    _, config = read_config(run_dir)
    earlier = target / CARD
    if is_edited(earlier):
        shutil.copyfile(earlier, export / CARD)
        return
    found = image_grids(run_dir)
    if found:
        shutil.copyfile(found[-1], export / GRID)
    rows = read_metrics(run_dir)
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    trainer, base = config.get("trainer", ""), config.get("model", {}).get("path", "")
    lines = ["---", "library_name: diffusers", f"tags: [mrl, {trainer}]", "---", f"# {run_dir.name}", ""]
    lines.append(f"A diffusion model after {step} steps of `trainer: {trainer}`, from `{base}`; trained with mrl.")
    if rewards:
        reward = config.get("reward", {}).get("function", "")
        lines += [
            "",
            f"Mean of the reward `{reward}`: {rewards[0]:.4f} at the first step, {rewards[-1]:.4f} at the last.",
        ]
        lines.append("Training on a reward for long may over-optimize it at the cost of quality: look at the images.")
    if rewards and (curve := first_curve(run_dir.name, rows)) is not None:
        (export / CURVE).write_bytes(curve)
        lines += ["", f"![mean reward by step]({CURVE})"]
    lines += _by_prompt(rows)
    lines += ["", f"Prompts: {config.get('data', {}).get('train', '')}."]
    lines += ["", f"![images of the last grid]({GRID})"] if found else []
    (export / CARD).write_text(sealed("\n".join(lines) + "\n"), encoding="utf-8")


def _by_prompt(rows: list[Row]) -> list[str]:
    """Table of the rewards of the grid's prompts."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(BY_PROMPT))
    found = {name: [row[name] for row in rows if name in row] for name in names}
    table = [
        f"| {name.removeprefix(BY_PROMPT).replace('|', '/')} | {values[0]:.4f} | {values[-1]:.4f} |"
        for name, values in found.items()
    ]
    return ["", "| prompt | first | last |", "|---|---|---|", *table] if table else []
