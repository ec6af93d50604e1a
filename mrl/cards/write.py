"""Writes a card into an export before the export gets its final name; never overwrites edits."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from mrl.cards.facts import CardFacts, WeightsOrigin
from mrl.cards.text import render
from mrl.observe.report import FIRST_CURVE, first_curve

CARD = "README.md"
_SEAL = re.compile(r"\n<!-- written by mrl, sha256 ([0-9a-f]{64}) -->\n\Z")


def write_card(facts: CardFacts, export: Path, earlier: Path | None = None) -> str:
    """Writes README.md and its picture into `export`; returns a note, empty without one.

    earlier: the directory that `export` will replace; an edited card there is kept
    """
    if earlier is not None and is_edited(earlier / CARD):
        shutil.copyfile(earlier / CARD, export / CARD)
        if (earlier / FIRST_CURVE).is_file():
            shutil.copyfile(earlier / FIRST_CURVE, export / FIRST_CURVE)
        return f"{earlier / CARD} was edited by hand and is kept: its figures describe the earlier weights"
    picture = first_curve(facts.name, facts.rows)
    if picture is not None:
        (export / FIRST_CURVE).write_bytes(picture)
    (export / CARD).write_text(sealed(render(facts, has_curve=picture is not None)), encoding="utf-8")
    return ""


def without_card(export: Path, target: Path, error: Exception) -> str:
    """Removes a partial card from `export`; returns the reason why `target` has none."""
    for half in (CARD, FIRST_CURVE):
        (export / half).unlink(missing_ok=True)
    return f"{target} has no {CARD}: {type(error).__name__}: {error}"


def write_run_card(
    origin: WeightsOrigin, export: Path, earlier: Path, digests: Mapping[str, str], base: Mapping[str, str]
) -> str:
    """Writes the card of a run's weights like `write_card`; an error becomes the note and is never raised.

    digests, base: SHA-256 of the weight files in `export` and of the run's base model
    """
    try:
        return write_card(CardFacts.of(origin, export, digests, base), export, earlier)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return without_card(export, earlier, error)


def sealed(text: str) -> str:
    """Returns `text` with a last line that reveals later changes."""
    return f"{text}\n<!-- written by mrl, sha256 {_digest(text)} -->\n"


def is_edited(card: Path) -> bool:
    """True if the card exists and differs from what mrl wrote."""
    if not card.is_file():
        return False
    text = card.read_bytes().decode(errors="replace")
    seal = _SEAL.search(text)
    return seal is None or _digest(text[: seal.start()]) != seal[1]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
