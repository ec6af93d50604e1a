"""The tokenizer of a Hugging Face directory, with every correction said aloud."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "ANSWER"


class TokenizerError(ValueError):
    """The directory holds no usable tokenizer; the message says what is missing."""


class Tokenizer:
    """What the trainer needs of a tokenizer. `notes` lists the corrections made at loading, for the log."""

    def __init__(self, hf: PreTrainedTokenizerBase, notes: list[str]) -> None:
        self.hf = hf
        self.notes = notes
        self.eos_id: int = hf.eos_token_id
        self.pad_id: int = hf.pad_token_id

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Raw text -> ids, with the tokenizer's own leading special tokens (BOS) but never a trailing EOS."""
        encoded = self._ids(texts, special=True)
        if not any(ids and ids[-1] == self.eos_id for ids in encoded):
            return encoded
        return [
            ids[:-1] if len(ids) > len(bare) and ids[-1] == self.eos_id else ids
            for ids, bare in zip(encoded, self.encode_plain(texts), strict=True)
        ]

    def encode_plain(self, texts: list[str]) -> list[list[int]]:
        """Text -> ids without any special token: answers, and text that a chat template has already dressed."""
        return self._ids(texts, special=False)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text, without special tokens unless asked for."""
        text: str = self.hf.decode(list(ids), skip_special_tokens=not special)
        return text

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    def dress(self, messages: list[dict[str, Any]]) -> str:
        """A conversation through the chat template, up to where the assistant's next answer begins."""
        text: str = self.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text

    def turn_notes(self) -> list[str]:
        """What to know where the chat template ends the assistant's turns with another special token than EOS."""
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        try:
            text: str = self.hf.apply_chat_template(messages, tokenize=False)
        except (TemplateError, TypeError):  # its own rules of what a conversation is
            return []
        [ids] = self.encode_plain([text.rpartition(_MARK)[2].strip()])
        if not ids or ids[0] == self.eos_id or ids[0] not in self.hf.all_special_ids:
            return []
        end = self.hf.convert_ids_to_tokens(ids[0])
        return [
            f"the chat template ends the assistant's turns with {end!r}, the EOS token is {self.hf.eos_token!r}; "
            f"model.eos_token: {end!r} would make it the one"
        ]

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        ids: list[list[int]] = self.hf(texts, add_special_tokens=special)["input_ids"] if texts else []
        return ids


def load_tokenizer(path: str | Path, eos_token: str | None = None) -> Tokenizer:
    """Load from local files only, and make sure that there is an EOS and a PAD token.

    `eos_token`, if given, takes the place of the tokenizer's own. A missing EOS is taken from the model's config.json,
    a missing PAD becomes the EOS. Every correction is in `Tokenizer.notes`. Raises TokenizerError if there are no
    tokenizer files, no EOS anywhere, or if `eos_token` is no token of the vocabulary.
    """
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise TokenizerError(
            f"{path}: no tokenizer could be loaded; expected tokenizer.json or the model's own files ({error})"
        ) from error
    notes: list[str] = []
    if eos_token is not None and eos_token != hf.eos_token:
        if eos_token not in hf.get_vocab():
            raise TokenizerError(f"{path}: model.eos_token {eos_token!r} is no token of the vocabulary")
        notes.append(f"the EOS token is {eos_token!r} (model.eos_token), the tokenizer has {hf.eos_token!r}")
        hf.eos_token = eos_token
    if hf.eos_token_id is None:
        hf.eos_token = _eos_of_config(Path(path), hf)
        notes.append(f"the tokenizer names no EOS token; using {hf.eos_token!r} from config.json")
    if hf.pad_token_id is None:
        hf.pad_token = hf.eos_token
        notes.append(f"the tokenizer names no PAD token; using the EOS token {hf.eos_token!r}")
    return Tokenizer(hf, notes)


def _eos_of_config(path: Path, hf: PreTrainedTokenizerBase) -> str:
    file = path / "config.json"
    eos = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    first = eos[0] if isinstance(eos, list) and eos else eos
    token = hf.convert_ids_to_tokens(first) if isinstance(first, int) else None
    if not isinstance(token, str):
        raise TokenizerError(
            f"{path}: neither the tokenizer nor config.json names an EOS token; set eos_token in tokenizer_config.json"
        )
    return token
