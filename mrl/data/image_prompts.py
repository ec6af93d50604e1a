"""Image placeholders of a prompt, before it is tokenised."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.config.schema import DataConfig
from mrl.families import load_arch

if TYPE_CHECKING:
    from mrl.data.image_processor import ImageProcessor

IMAGE_PLACEHOLDER = "<image>"  # placeholder of an image in a prompt
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"  # an image in a prompt without chat template


def load_image_processor(path: str | Path, cfg: DataConfig) -> ImageProcessor | None:
    """Returns the image processor of the model at `path`; None for a text-only model. Raises DataError as
    `ImageProcessor` does.
    """
    vision = load_arch(path).vision
    if vision is None:
        return None
    from mrl.data.image_processor import ImageProcessor

    return ImageProcessor(path, vision, cfg)


def split_at_images(messages: list[dict[str, Any]], pictures: int | None) -> list[dict[str, Any]]:
    """Returns messages whose text is split at each `<image>`: {"type": "image"} there, {"type": "text"} between.

    Images without a placeholder come first in the user's first message. pictures: number of images; None for a
    text-only model, to which `<image>` is text. Raises ValueError if the number of placeholders is not the number of
    images.
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


def with_image_text(text: str, pictures: int | None) -> str:
    """Returns text without chat template, with images in place of each `<image>`, or at its beginning. pictures: as in
    `split_at_images`. Raises ValueError if the number of placeholders is not the number of images.
    """
    if pictures is None:
        return text
    placed = _are_placed(text.count(IMAGE_PLACEHOLDER), pictures)
    return text.replace(IMAGE_PLACEHOLDER, IMAGE_TEXT) if placed else IMAGE_TEXT * pictures + text


def _are_placed(places: int, pictures: int) -> bool:
    """Returns True if the prompt places its images, False if it has no placeholder. Raises ValueError for any other
    number.
    """
    if places != pictures and places:
        raise ValueError(
            f"the prompt has {places} image placeholders ({IMAGE_PLACEHOLDER}), and the row {pictures} images"
        )
    return places == pictures


def _parts(content: Any) -> list[dict[str, Any]] | None:
    if not isinstance(content, str):
        return content
    texts = content.split(IMAGE_PLACEHOLDER)
    found: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        found += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return found
