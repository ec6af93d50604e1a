"""Control tokens, such as <|im_start|>, in the text of rows: they must not become turns of a conversation.

A tokenizer reads the name of a special token as that token at every position. Here each special token gets a private
name first, a character of Unicode's last plane, where fonts keep no icons. The chat template's own special tokens are
written with private names; names in a row's text stay as they are and become ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

FIRST_PRIVATE, LAST_PRIVATE = 0x10A000, 0x10FFFD


class ControlTokens:
    """The special tokens of a tokenizer, by their names."""

    def __init__(self, hf: PreTrainedTokenizerBase) -> None:
        self._hf = hf
        names = {str(token) for token in hf.added_tokens_decoder.values() if token.special}
        self._names = sorted(names - {""}, key=lambda name: (-len(name), name))
        self._place = {name: place for place, name in enumerate(self._names)}
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        count = len(self._names)
        self._in_rows = min(FIRST_PRIVATE, LAST_PRIVATE + 1 - 2 * count)  # private characters: for names in rows
        self._of_tokens = self._in_rows + count  # for the tokens themselves
        last = self._of_tokens + count - 1
        self._reserved = re.compile(f"[{chr(self._in_rows)}-{chr(last)}]" if count else r"(?!)")
        self._names_of_private = {self._in_rows + place: name for place, name in enumerate(self._names)}

    def first_in(self, value: Any) -> str | None:
        """Returns the first name in a text, or in the texts of a conversation; None if there is none."""
        if isinstance(value, str):
            found = self._pattern.search(value)
            return found[0] if found else None
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return next((name for part in parts if (name := self.first_in(part))), None)

    def reserved_in(self, text: str) -> str | None:
        """Returns the first character of a text that is a private name; None if there is none."""
        found = self._reserved.search(text)
        return found[0] if found else None

    def escape(self, value: Any) -> Any:
        """Returns the value with a private character in place of every name."""
        if isinstance(value, str):
            return self._pattern.sub(lambda name: chr(self._in_rows + self._place[name[0]]), value)
        if isinstance(value, dict):
            return {key: self.escape(part) for key, part in value.items()}
        return [self.escape(part) for part in value] if isinstance(value, list) else value

    def unescape(self, text: str) -> str:
        """Inverts `escape`."""
        return text.translate(self._names_of_private)

    def encode(self, hidden: str) -> list[int] | None:
        """Returns the ids of a text: hidden names as text, other names as their tokens, and no further special tokens.

        Returns None if this tokenizer cannot distinguish the two.
        """
        found = self.encode_with_spans(hidden, [])
        return found and found[0]

    def encode_with_spans(
        self, hidden: str, places: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, int]], list[int]] | None:
        """Returns `encode`'s ids, the characters [begin, end) of each id, and `places` in the same count of
        characters.
        """
        if not self._hf.is_fast or self.reserved_in(self.unescape(hidden)):
            return None
        wanted = [self._hf.convert_tokens_to_ids(name) for name in self._pattern.findall(hidden)]
        backend, original = self._renamed
        encoded = backend.encode(self._private(hidden), add_special_tokens=False)
        ids = [original.get(i, i) for i in encoded.ids]
        special = {*self._hf.convert_tokens_to_ids(self._names)} - {self._hf.unk_token_id}
        if [i for i in ids if i in special] != [i for i in wanted if i in special]:
            return None
        return ids, encoded.offsets, [len(self._private(hidden[:place])) for place in places]

    def _private(self, hidden: str) -> str:
        """Returns the text as the renamed tokenizer reads it."""
        return self.unescape(self._pattern.sub(lambda name: chr(self._of_tokens + self._place[name[0]]), hidden))

    @cached_property
    def _renamed(self) -> tuple[Backend, dict[int | None, int]]:
        """The tokenizer with private names, and a map from its ids of added tokens to the original ids."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        settings = json.loads(self._hf.backend_tokenizer.to_str())
        added, settings["added_tokens"] = settings["added_tokens"], []
        backend = Backend.from_str(
            json.dumps({**settings, "truncation": None, "padding": None, "post_processor": None})
        )
        original: dict[int | None, int] = {}
        for token in added:
            number, name = token.pop("id"), token.pop("content")
            name = chr(self._of_tokens + self._place[name]) if name in self._place else name
            backend.add_tokens([AddedToken(name, **token)])
            original[backend.token_to_id(name)] = number
        return backend, original
