"""Where a prompt has its pictures, before it is tokenised."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.config.schema import DataConfig
from mrl.families import load_arch

if TYPE_CHECKING:
    from mrl.data.eyes import Eyes

PLACE = "<image>"  # where a prompt has a picture
SPELLED = "<|vision_start|><|image_pad|><|vision_end|>"  # one, in a prompt that no chat template dresses


def load_eyes(path: str | Path, cfg: DataConfig) -> Eyes | None:
    """How the model at `path` sees pictures; None for one of text alone. Raises DataError as `Eyes`."""
    vision = load_arch(path).vision
    if vision is None:
        return None
    from mrl.data.eyes import Eyes

    return Eyes(path, vision, cfg)


def with_places(messages: list[dict[str, Any]], pictures: int | None) -> list[dict[str, Any]]:
    """Messages whose text has parts where it says `<image>`: {"type": "image"} there, {"type": "text"} between.
    Pictures that no text places come first in the first message of the user. pictures: None where the model sees none,
    and `<image>` is text.

    Raises ValueError where places are not as many as pictures.
    """
    if pictures is None:
        return messages
    split = [{**message, "content": _parts(message["content"])} for message in messages]
    places = sum(part.get("type") == "image" for message in split for part in message["content"] or ())
    if _are_placed(places, pictures):
        return split if pictures else messages
    first = next((message for message in split if message.get("role") == "user"), split[0])
    first["content"] = [{"type": "image"}] * pictures + (first["content"] or [])
    return split


def spelled(text: str, pictures: int | None) -> str:
    """Text that no chat template dresses, with pictures where it says `<image>`, or at its beginning. pictures: as in
    `with_places`. Raises ValueError where places are not as many as pictures."""
    if pictures is None:
        return text
    placed = _are_placed(text.count(PLACE), pictures)
    return text.replace(PLACE, SPELLED) if placed else SPELLED * pictures + text


def _are_placed(places: int, pictures: int) -> bool:
    """Whether the prompt says where its pictures are; False where it says nothing of them. Raises ValueError for other
    numbers."""
    if places != pictures and places:
        raise ValueError(f"the prompt has {places} places for pictures ({PLACE}), the row {pictures} pictures")
    return places == pictures


def _parts(content: Any) -> list[dict[str, Any]] | None:
    if not isinstance(content, str):
        return content
    texts = content.split(PLACE)
    found: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        found += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return found
