"""Rewards of images: a user's function of (images, prompts, rows), and built-ins. `images` is float32 [n, channels,
height, width] in 0..1.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mrl import user_functions
from mrl.config.builtin_rewards import IMAGE_SCORER
from mrl.reward.errors import RewardError
from mrl.reward.loading import Settings, load_file
from mrl.reward.score_requests import ScoreRequest

if TYPE_CHECKING:
    import numpy as np

JPEG_QUALITY = 95


def brightness(images: np.ndarray, prompts: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Returns the mean over all pixels and channels of each image, [n] in 0..1."""
    return [float(value) for value in images.mean((1, 2, 3))]


def jpeg_incompressibility(images: np.ndarray, prompts: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Returns the size of each image as a JPEG of quality 95, [n] in kilobytes of 1000 bytes (arXiv 2305.13301)."""
    files = (encode_image((image * 255).round().astype("uint8"), "JPEG", quality=JPEG_QUALITY) for image in images)
    return [len(file) / 1000 for file in files]


def jpeg_compressibility(images: np.ndarray, prompts: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Returns minus `jpeg_incompressibility`, [n]."""
    return [-value for value in jpeg_incompressibility(images, prompts, rows)]


BUILTINS: dict[str, Callable[..., Any]] = {
    "brightness": brightness,
    "jpeg_compressibility": jpeg_compressibility,
    "jpeg_incompressibility": jpeg_incompressibility,
}


def load_images(spec: str, where: str, settings: Settings) -> Callable[[Sequence[ScoreRequest]], Any]:
    """Returns the function of images that `spec`, the value of reward.`where`, names. Raises RewardError."""
    if ":" in spec:
        function = load_file(spec, f"reward.{where}", ([], [], []), "(images, prompts, rows)")
    elif spec in BUILTINS:
        function = BUILTINS[spec]
    elif spec == IMAGE_SCORER:
        from mrl.reward.scorer import Scorer

        function = Scorer(**settings[spec])
    else:
        known = f"{', '.join((*BUILTINS, IMAGE_SCORER))}, or path/to/file.py:name"
        near = user_functions.near(spec, (*BUILTINS, IMAGE_SCORER))
        raise RewardError(f"reward.{where} {spec!r} is not a built-in{near}; known: {known}")
    return lambda calls: function(_stacked(calls), [call.prompt for call in calls], [call.row for call in calls])


def _stacked(calls: Sequence[ScoreRequest]) -> np.ndarray:
    import numpy as np

    return np.stack([call.image for call in calls if call.image is not None]).astype(np.float32) / 255


def encode_image(levels: np.ndarray, kind: str, **settings: Any) -> bytes:
    """Returns an image [1 or 3, H, W] uint8 as a file of this kind (PIL's name)."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(levels[0] if len(levels) == 1 else levels.transpose(1, 2, 0)).save(buffer, kind, **settings)
    return buffer.getvalue()
