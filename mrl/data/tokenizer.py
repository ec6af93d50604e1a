"""Tokenizer of a Hugging Face directory. Every correction is reported in `Tokenizer.notes`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jinja2 import TemplateError

from mrl.config import tokenizer_files
from mrl.config.problems import printable, shortened
from mrl.core import Ids
from mrl.data.control_tokens import ControlTokens
from mrl.data.limits import resource_limits
from mrl.foreign import check_links, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_MARK = "ANSWER"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
CLOCK = "strftime_now"  # function of chat templates that returns today's date
TODAY = datetime(2024, 7, 26)  # fixed date: a resumed run, and every rank, gets the same prompts
TEMPLATE_S = 5.0  # of processor time, for one conversation
TEMPLATE_BYTES = 1 << 30  # of memory, for one conversation
MAX_TEXT_BYTES = 64 << 20


class TokenizerError(ValueError):
    """The directory holds no usable tokenizer; the message says what is missing."""


class Tokenizer:
    """Tokenizer of the trainer. `notes` lists the corrections made at loading, for the log."""

    def __init__(self, hf: PreTrainedTokenizerBase, notes: list[str]) -> None:
        self.hf = hf
        self.notes = notes
        self.eos_id: int = hf.eos_token_id
        self.pad_id: int = hf.pad_token_id
        self.control = ControlTokens(hf)

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of raw text, with the tokenizer's own leading special tokens (BOS), unless the text begins
        with them, and without its trailing ones.
        """
        lead = self._lead
        encoded = self.encode_plain(texts)
        return [ids if ids[: len(lead)] == lead else [*lead, *ids] for ids in encoded]

    @property
    def _lead(self) -> list[int]:
        """Special tokens that the tokenizer puts before every text. Not cached: some libraries let them be changed."""
        [plain], [special] = self._ids(["x"], special=False), self._ids(["x"], special=True)
        places = (i for i in range(len(special)) if special[i : i + len(plain)] == plain)
        return special[: next(places, 0)]

    def encode_plain(self, texts: list[str]) -> list[list[int]]:
        """Returns ids without any special token added: for answers, and for text that a chat template has rendered."""
        return self._ids(texts, special=False)

    def with_eos(self, ids: list[int]) -> list[int]:
        """Returns the ids with one EOS at their end."""
        return ids if ids[-1:] == [self.eos_id] else [*ids, self.eos_id]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Returns the text, without special tokens unless `special_tokens`."""
        text: str = self.hf.decode(list(ids), skip_special_tokens=not special)
        return text

    def decode_all(self, responses: Sequence[Ids]) -> list[str]:
        """Returns the text of each response, as `decode` does; uses all cores if the tokenizer supports it."""
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

    def render_prompt(self, messages: list[dict[str, Any]], **more: Any) -> str:
        """Renders a conversation with the chat template, up to the start of the assistant's next answer. more: further
        variables of the template, such as `tools`.

        Raises ValueError for a conversation that the template refuses or fails on, TokenizerError if the template does
        not terminate.
        """
        return self._render(messages, add_generation_prompt=True, **more)

    def render_conversation(self, messages: list[dict[str, Any]], **more: Any) -> str:
        """Renders a conversation up to the assistant's last answer, which ends as the template ends a turn. Raises as
        `render_prompt`.
        """
        return self._render(messages, add_generation_prompt=False, **more)

    @property
    def has_generation_marks(self) -> bool:
        """True if the chat template marks the parts of a conversation that the assistant generates."""
        return bool(_GENERATION.search(str(self.hf.chat_template)))

    def render_marked_conversation(
        self, messages: list[dict[str, Any]], **more: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns `render_conversation`, and the character spans [begin, end) that the template marks. Raises as
        `render_prompt`.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.hf.get_chat_template()

        def render() -> tuple[str, list[tuple[int, int]]]:
            texts, spans = render_jinja_template(
                [messages],
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self.hf.special_tokens_map,
                **{CLOCK: TODAY.strftime},
                **more,
            )
            return texts[0], [(int(first), int(after)) for first, after in spans[0]]

        return self._refusing(render)

    def encode_with_spans(
        self, hidden: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of a conversation, and the token spans of its character spans. A token that lies over the
        first character of a span is part of the span.

        hidden: the text with control tokens in its messages as `ControlTokens.escape` returns them
        Raises ValueError if this tokenizer has no character offsets of its tokens.
        """
        found = self.control.encode_with_spans(hidden, [place for span in spans for place in span])
        if found is None:
            raise ValueError("the tokenizer has no character offsets of its tokens, or does not mark control tokens")
        ids, offsets, places = found
        begins = np.array([first for first, _ in offsets], dtype=np.int64)
        ends = np.array([after for _, after in offsets], dtype=np.int64)
        first = np.searchsorted(np.maximum.accumulate(ends), places[0::2], side="right")
        after = np.searchsorted(np.maximum.accumulate(begins), places[1::2], side="left")
        return ids, list(zip(first.tolist(), after.tolist(), strict=True))

    def turn_notes(self) -> list[str]:
        """Returns a note if the chat template ends the assistant's turns with a special token other than EOS."""
        ids = self._after_a_turn()
        if not ids or ids[0] == self.eos_id or ids[0] not in self.hf.all_special_ids:
            return []
        end = self.hf.convert_ids_to_tokens(ids[0])
        return [
            f"the chat template ends the assistant's turns with {end!r}, and the EOS token is {self.hf.eos_token!r}: "
            f"set model.eos_token: {end!r} to use the template's"
        ]

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that may end a turn: EOS, and all added tokens of the vocabulary."""
        return frozenset({self.eos_id, *self.hf.added_tokens_decoder})

    def end_token_of(self, ids: Sequence[int]) -> int | None:
        """Returns the token that ends a turn, followed by white space at most; None if there is none."""
        place = next((i for i in reversed(range(len(ids))) if ids[i] in self.end_tokens), None)
        if place is None or self.decode(ids[place + 1 :], special=True).strip():
            return None
        return int(ids[place])

    @cached_property
    def next_turn_token(self) -> int | None:
        """Token that begins the user's next turn, in a chat template that ends the assistant's turns with nothing else,
        as GLM's does; None for other templates.
        """
        if not self.has_chat_template or self._after_a_turn():
            return None
        ids = self._after_a_turn({"role": "user", "content": "x"})
        return ids[0] if ids and ids[0] in self.end_tokens else None

    def _after_a_turn(self, *more: dict[str, Any]) -> list[int]:
        """Returns the ids that the chat template writes after the assistant's words; none if the template refuses the
        probe conversation.
        """
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self.render_conversation([*messages, *more])
        except ValueError:
            return []
        [ids] = self.encode_plain([text.rpartition(_MARK)[2].strip()])
        return ids

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        def render() -> tuple[str, int]:
            text: str = self.hf.apply_chat_template(messages, tokenize=False, **{CLOCK: TODAY.strftime}, **options)
            return text, len(text.encode())

        text, size = self._refusing(render)
        if size > MAX_TEXT_BYTES:
            raise ValueError(f"the chat template expands it to {size} bytes; the limit is {MAX_TEXT_BYTES}")
        if any(not isinstance(m["content"], str) and str(m["content"]) in text for m in messages if m.get("content")):
            raise ValueError(
                "the chat template supports text content only, and would print this content as a Python object"
            )
        return text

    def _refusing(self, render: Callable[[], T]) -> T:
        """Runs `render`, which applies the chat template, within time and memory limits."""
        try:
            with resource_limits(TEMPLATE_S, TEMPLATE_BYTES):
                return render()
        except TimeoutError:
            where = f"the chat template of {self.hf.name_or_path}"
            raise TokenizerError(f"{where} did not finish one conversation within {TEMPLATE_S:g} s") from None
        except Exception as error:  # foreign code can raise anything
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            what = printable(shortened(f"{kind}{error}", most=300))
            raise ValueError(f"the chat template rejects it: {what}") from error

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        try:
            ids: list[list[int]] = self.hf(texts, add_special_tokens=special)["input_ids"] if texts else []
        except Exception as error:  # of a foreign file
            reason = printable(shortened(str(error), most=300))
            raise TokenizerError(f"the tokenizer of {self.hf.name_or_path} cannot encode text: {reason}") from error
        return ids


def load_tokenizer(path: str | Path, eos_token: str | None = None, chat_template: str | None = None) -> Tokenizer:
    """Loads from local files only, and makes sure that there are an EOS and a PAD token.

    `eos_token`, and `chat_template`, a file, take the place of the tokenizer's own. A missing EOS is taken from the
    model's config.json; a missing PAD becomes the EOS. Every correction is in `Tokenizer.notes`. Code that comes with a
    tokenizer is never run.

    Raises TokenizerError if there are no tokenizer files, no EOS anywhere, if `eos_token` is not in the vocabulary, or
    if the model (config.json) has no embedding for some tokens.
    """
    from transformers import AutoTokenizer

    vocab_size = _vocab_size_of_config(Path(path))
    for _, problem in tokenizer_files.tokenizer_problems(path, vocab_size, eos_token):
        raise TokenizerError(problem)
    try:
        hf = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries can raise anything on foreign files
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
            raise TokenizerError(f"{path}: model.eos_token {eos_token!r} is not in the vocabulary")
        notes.append(f"the EOS token is {eos_token!r} (model.eos_token) instead of the tokenizer's {hf.eos_token!r}")
        hf.eos_token = eos_token
    if chat_template is not None:
        hf.chat_template = _template(Path(chat_template))
        notes.append(f"the chat template is that of {chat_template} (model.chat_template)")
    if CLOCK in str(hf.chat_template):
        notes.append(
            f"the chat template writes today's date: mrl fixes it to {TODAY:%d %b %Y}, so that a resumed run has the "
            "same prompts (set model.chat_template to use another date)"
        )
    if hf.eos_token_id is None:
        hf.eos_token = _eos_of_config(Path(path), hf)
        notes.append(f"the tokenizer has no EOS token; using {hf.eos_token!r} from config.json")
    if hf.pad_token_id is None:
        hf.pad_token = hf.eos_token
        notes.append(f"the tokenizer has no PAD token; using the EOS token {hf.eos_token!r}")
    return Tokenizer(hf, notes)


def hf_tokenizer(
    name_or_path: str | Path, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """Loads a transformers tokenizer with verl's corrections, each of which gives a warning.

    A run uses `load_tokenizer` instead, which reads local files alone and checks them against the model.

    Args:
        name_or_path: Directory, or name on the Hugging Face hub.
        correct_pad_token: Uses the EOS token as PAD if there is no PAD token.
        correct_gemma2: Uses <end_of_turn> as the EOS token of gemma-2-2b-it, whose own is ambiguous.
        **kwargs: For `AutoTokenizer.from_pretrained`; an eos_token takes precedence over the correction.

    Returns:
        The tokenizer.

    Raises:
        TokenizerError: If the PAD token is to be corrected and there is no EOS token either.
        OSError: If there is no such tokenizer.
    """
    from transformers import AutoTokenizer

    if correct_gemma2 and "gemma-2-2b-it" in str(name_or_path) and "eos_token" not in kwargs:
        kwargs["eos_token"] = "<end_of_turn>"
        warnings.warn(f"{name_or_path}: the EOS token is set to <end_of_turn>", stacklevel=2)
    hf: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    if correct_pad_token and hf.pad_token_id is None:
        if hf.eos_token is None:
            raise TokenizerError(f"{name_or_path} has neither a PAD nor an EOS token: pass pad_token or eos_token")
        hf.pad_token = hf.eos_token
        warnings.warn(f"{name_or_path}: the PAD token is set to the EOS token {hf.eos_token!r}", stacklevel=2)
    return hf


def _template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"model.chat_template: {file} cannot be read: {error}") from error


def _config(path: Path) -> dict[str, Any]:
    """Returns the model's config.json; an empty dict if there is none."""
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
