"""Built-in image reward "scorer": the similarity of an image and its prompt by a vision-language model. A separate
module, so that only its users import torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from mrl.foreign import complete
from mrl.reward.errors import RewardError


class Scorer:
    """Model from a transformers directory with an image and a text encoder (CLIP, SigLIP, PickScore), on the CPU.

    threads: number of threads of each process. Raises RewardError for another kind of directory.
    """

    def __init__(self, path: str, threads: int) -> None:
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        try:
            here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
            told = here | {"use_safetensors": True, "output_loading_info": True}
            self._processor: Any = transformers.AutoProcessor.from_pretrained(path, **here)
            self._model: Any = complete(transformers.AutoModel.from_pretrained(path, **told), path).eval()
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise RewardError(f"reward.scorer.path: {path} cannot be loaded by transformers: {error}") from error
        if not hasattr(self._model, "get_image_features") or not hasattr(self._model, "get_text_features"):
            name = type(self._model).__name__
            raise RewardError(f"reward.scorer.path: {path} is a {name}, which computes no image and text features")

    @torch.no_grad()
    def __call__(self, images: np.ndarray, prompts: list[str], rows: list[dict[str, Any]]) -> list[float]:
        """Returns cosines [n] of the embeddings of images [n, channels, H, W] in 0..1 and their (cut) prompts."""
        levels = (images * 255).round().astype(np.uint8).transpose(0, 2, 3, 1)
        pictures = [Image.fromarray(np.repeat(each, 3, 2) if each.shape[2] == 1 else each) for each in levels]
        given = self._processor(
            text=prompts, images=pictures, return_tensors="pt", padding="max_length", truncation=True
        )
        said = self._model(**given)
        cosines: list[float] = torch.cosine_similarity(said.image_embeds, said.text_embeds).tolist()
        return cosines
