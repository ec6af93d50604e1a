"""The tokenizer of a Hugging Face directory, with every correction said aloud."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from mrl.config import tokenizer_files
from mrl.config.problems import printable, shortened
from mrl.core import Ids
from mrl.data.control_tokens import ControlTokens
from mrl.data.limits import bounded
from mrl.foreign import check_links, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "ANSWER"
TEMPLATE_S = 5.0  # of processor time, for one conversation
TEMPLATE_BYTES = 1 << 30  # of memory, for one conversation
MAX_TEXT_BYTES = 64 << 20


class TokenizerError(ValueError):
    """The directory holds no usable tokenizer; the message says what is missing."""


class Tokenizer:
    """What the trainer needs of a tokenizer. `notes` lists the corrections made at loading, for the log."""

    def __init__(self, hf: PreTrainedTokenizerBase, notes: list[str]) -> None:
        self.hf = hf
        self.notes = notes
        self.eos_id: int = hf.eos_token_id
        self.pad_id: int = hf.pad_token_id
        self.control = ControlTokens(hf)

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

    def decode_all(self, responses: Sequence[Ids]) -> list[str]:
        """The text of each, as `decode` gives it; of many at once on all cores, where the tokenizer can do that."""
        from transformers import PreTrainedTokenizerFast

        lists = [np.asarray(ids).tolist() for ids in responses]
        plain = getattr(type(self.hf), "_decode", None) is PreTrainedTokenizerFast._decode
        if not plain or self.hf.clean_up_tokenization_spaces:
            return [self.decode(ids) for ids in lists]
        texts: list[str] = self.hf.backend_tokenizer.decode_batch(lists, skip_special_tokens=True)
        return texts

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    def dress(self, messages: list[dict[str, Any]]) -> str:
        """A conversation through the chat template, up to where the assistant's next answer begins.

        Raises ValueError for a conversation that it refuses or cannot compute, TokenizerError if it does not end.
        """
        return self._dress(messages, add_generation_prompt=True)

    def dress_whole(self, messages: list[dict[str, Any]]) -> str:
        """A conversation with the assistant's last answer, which ends as the template ends a turn. Raises as
        `dress`."""
        return self._dress(messages, add_generation_prompt=False)

    def turn_notes(self) -> list[str]:
        """What to know where the chat template ends the assistant's turns with another special token than EOS."""
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self._dress(messages)
        except ValueError:  # its own rules of what a conversation is
            return []
        [ids] = self.encode_plain([text.rpartition(_MARK)[2].strip()])
        if not ids or ids[0] == self.eos_id or ids[0] not in self.hf.all_special_ids:
            return []
        end = self.hf.convert_ids_to_tokens(ids[0])
        return [
            f"the chat template ends the assistant's turns with {end!r}, the EOS token is {self.hf.eos_token!r}; "
            f"model.eos_token: {end!r} would make it the one"
        ]

    def _dress(self, messages: list[dict[str, Any]], **options: Any) -> str:
        try:
            with bounded(TEMPLATE_S, TEMPLATE_BYTES):
                text: str = self.hf.apply_chat_template(messages, tokenize=False, **options)
                size = len(text.encode())
        except TimeoutError:
            where = f"the chat template of {self.hf.name_or_path}"
            raise TokenizerError(f"{where} has not ended after {TEMPLATE_S:g} s of one conversation") from None
        except Exception as error:  # a program from outside: whatever it likes
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            what = printable(shortened(f"{kind}{error}", most=300))
            raise ValueError(f"the chat template refuses it: {what}") from error
        if size > MAX_TEXT_BYTES:
            raise ValueError(f"the chat template makes {size} bytes of it, at most {MAX_TEXT_BYTES} can be read")
        if any(not isinstance(m["content"], str) and str(m["content"]) in text for m in messages if m.get("content")):
            raise ValueError(
                "the chat template knows content that is text only, and would show the model Python's form"
            )
        return text

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        try:
            ids: list[list[int]] = self.hf(texts, add_special_tokens=special)["input_ids"] if texts else []
        except Exception as error:  # of a foreign file
            reason = printable(shortened(str(error), most=300))
            raise TokenizerError(f"the tokenizer of {self.hf.name_or_path} cannot encode text: {reason}") from error
        return ids


def load_tokenizer(path: str | Path, eos_token: str | None = None) -> Tokenizer:
    """Load from local files only, and make sure that there is an EOS and a PAD token.

    `eos_token`, if given, takes the place of the tokenizer's own. A missing EOS is taken from the model's config.json,
    a missing PAD becomes the EOS. Every correction is in `Tokenizer.notes`. Raises TokenizerError if there are no
    tokenizer files, no EOS anywhere, if `eos_token` is no token of the vocabulary, or if the model (config.json) has
    no embedding for some tokens. Code that comes with a tokenizer is never run.
    """
    from transformers import AutoTokenizer

    vocab_size = _vocab_size_of_config(Path(path))
    for _, problem in tokenizer_files.problems(path, vocab_size, eos_token):
        raise TokenizerError(problem)
    try:
        hf = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries read foreign files, and raise whatever comes of it
        reason = " ".join(str(error).split())[:300]
        raise TokenizerError(
            f"{path}: no tokenizer could be loaded; expected tokenizer.json or the model's own files ({reason})"
        ) from error
    tokens = max(hf.get_vocab().values(), default=0) + 1
    if vocab_size is not None and tokens > vocab_size:
        raise TokenizerError(tokenizer_files.too_large(path, tokens, vocab_size))
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


def _config(path: Path) -> dict[str, Any]:
    """The model's config.json; empty if there is none."""
    try:
        check_links(path)
        content = read_json(path / "config.json")
    except OSError:
        return {}
    except ValueError as error:
        raise TokenizerError(str(error)) from error
    return content if isinstance(content, dict) else {}


def _vocab_size_of_config(path: Path) -> int | None:
    size = _config(path).get("vocab_size")
    return size if isinstance(size, int) else None


def _eos_of_config(path: Path, hf: PreTrainedTokenizerBase) -> str:
    eos = _config(path).get("eos_token_id")
    first = eos[0] if isinstance(eos, list) and eos else eos
    token = hf.convert_ids_to_tokens(first) if isinstance(first, int) else None
    if not isinstance(token, str):
        raise TokenizerError(
            f"{path}: neither the tokenizer nor config.json names an EOS token; set eos_token in tokenizer_config.json"
        )
    return token
