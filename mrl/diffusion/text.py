"""Text conditioning for each kind of net, by the frozen text encoders of a diffusers directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from mrl import platform
from mrl.foreign import complete, read_json

TOKENIZERS = {  # by the encoder's class
    "CLIPTextModel": "CLIPTokenizer",
    "CLIPTextModelWithProjection": "CLIPTokenizer",
    "T5EncoderModel": "T5TokenizerFast",
}
SD3_TOKENS, FLUX_TOKENS = 256, 512  # T5 tokens, as in diffusers' pipelines
EncodeTexts = Callable[[list[str]], dict[str, Tensor]]


class Encoder:
    """A text encoder and its tokenizer. suffix: "" or "_2", ...; longest: tokens of a prompt; None: the tokenizer's.

    Raises OSError or ValueError for unreadable parts.
    """

    def __init__(self, path: Path, suffix: str, dtype: torch.dtype, longest: int | None = None) -> None:
        folder = path / f"text_encoder{suffix}"
        [name] = read_json(folder / "config.json").get("architectures") or [""]
        if name not in TOKENIZERS:
            raise ValueError(f"{folder} is a {name or 'model without a name'}; supported: {', '.join(TOKENIZERS)}")
        transformers.utils.logging.disable_progress_bar()
        self._tokenizer = getattr(transformers, TOKENIZERS[name]).from_pretrained(path / f"tokenizer{suffix}")
        read = getattr(transformers, name).from_pretrained(folder, dtype=dtype, output_loading_info=True)
        model = complete(read, folder)
        self._model = model.to(platform.device()).eval().requires_grad_(False)
        self._longest = longest or self._tokenizer.model_max_length

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> Any:
        """Returns the model's full output for texts padded to `longest` tokens."""
        given = self._tokenizer(
            texts, padding="max_length", max_length=self._longest, truncation=True, return_tensors="pt"
        )
        return self._model(given.input_ids.to(platform.device()), output_hidden_states=True)


def clip(path: Path, config: dict[str, Any], dtype: torch.dtype) -> EncodeTexts:
    """Stable Diffusion 1 and 2: the encoder's last hidden states [n, L, D]."""
    encoder = Encoder(path, "", dtype)
    return lambda texts: {"encoder_hidden_states": encoder(texts)[0].float()}


def sd3(path: Path, config: dict[str, Any], dtype: torch.dtype) -> EncodeTexts:
    """Stable Diffusion 3: penultimate states of two CLIPs side by side, then T5's (zeros if absent); both CLIPs'
    projections."""
    clips = [Encoder(path, suffix, dtype) for suffix in ("", "_2")]
    t5 = Encoder(path, "_3", dtype, SD3_TOKENS) if (path / "text_encoder_3").is_dir() else None
    width = config["joint_attention_dim"]

    def encode(texts: list[str]) -> dict[str, Tensor]:
        found = [each(texts) for each in clips]
        states = torch.cat([each.hidden_states[-2].float() for each in found], dim=-1)
        states = torch.nn.functional.pad(states, (0, width - states.shape[-1]))
        words = t5(texts)[0].float() if t5 is not None else states.new_zeros(len(texts), SD3_TOKENS, width)
        pooled = torch.cat([each[0].float() for each in found], dim=-1)
        return {"encoder_hidden_states": torch.cat([states, words], dim=1), "pooled_projections": pooled}

    return encode


def flux(path: Path, config: dict[str, Any], dtype: torch.dtype) -> EncodeTexts:
    """Flux: T5's hidden states, and CLIP's pooled output."""
    pooled, words = Encoder(path, "", dtype), Encoder(path, "_2", dtype, FLUX_TOKENS)
    return lambda texts: {
        "encoder_hidden_states": words(texts)[0].float(),
        "pooled_projections": pooled(texts).pooler_output.float(),
    }


ENCODINGS: dict[str, Callable[[Path, dict[str, Any], torch.dtype], EncodeTexts]] = {
    "clip": clip,
    "sd3": sd3,
    "flux": flux,
}
