"""Tokens between two turns of the model. Earlier text is never tokenised again.

With a chat template, the tokens of new messages are those that they add to any conversation: rendered after a dummy
turn of the assistant, without that turn. This requires that the template renders earlier messages unchanged when more
follow; a probe at the start finds the roles of messages for which that holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from mrl.agents import AgentError
from mrl.agents.chat import Message
from mrl.data import Tokenizer

_CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
_DUMMY: list[Message] = [
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "d", "reasoning_content": "d", "tool_calls": [_CALL]},
]
_PLAIN: list[Message] = [{"role": "user", "content": "d"}, {"role": "assistant", "content": "d"}]
KINDS = ("user", "tool")
MOST_BASES = 256  # cached renderings of the dummy, one for each set of template variables


class Suffix:
    """Tokens of new messages, for one tokenizer.

    stops: tokens that end a turn; needed: raise AgentError if messages of no role can be said (there is no alternative)
    kinds: roles of the messages that an environment may say; none without a chat template
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[int, ...], is_chat: bool, needed: bool = True) -> None:
        self._tokenizer, self._is_chat = tokenizer, is_chat
        self._bases: dict[str, list[int]] = {}
        self.kinds: tuple[str, ...] = ()
        if not is_chat:
            return
        reasons = {}
        for kind in KINDS:
            try:
                tail = self._tail([{"role": kind, "content": "d"}])
                if not {self._end, tail[0]} & {*stops}:
                    end = tokenizer.decode([self._end or tail[0]], special=True)
                    raise AgentError(f"it ends turns with {end!r}, which does not end a response: set model.eos_token")
            except AgentError as error:
                reasons[kind] = str(error)
            else:
                self.kinds += (kind,)
        if not self.kinds and needed:
            why = "; ".join(f"{kind} messages: {reason}" for kind, reason in reasons.items())
            raise AgentError(f"the chat template cannot continue after a turn of the model: {why}")

    def __call__(
        self, said: Sequence[Message | str], last: int, more: Mapping[str, Any] | None = None
    ) -> list[int] | None:
        """Returns the ids of the words after a turn whose last token is `last`; None if that turn was truncated. more:
        further variables of the chat template, such as `tools`. Raises AgentError for words that cannot be said.
        """
        if not self._is_chat:
            texts = [each for each in said if isinstance(each, str)]
            if len(texts) < len(said):
                raise AgentError("data.chat_template is false: send text, not messages")
            return self._encoded("".join(texts))
        messages = self.messages(said)
        if wrong := [message.get("role") for message in messages if message.get("role") not in self.kinds]:
            can = " and ".join(self.kinds)
            raise AgentError(f"the chat template cannot add messages of the role {wrong[0]!r}, only of {can}")
        tail = self._tail(messages, more)
        if last == self._end:
            return tail
        return tail[1:] if last == tail[0] else None  # a template may stop a turn by what begins the next one

    @staticmethod
    def messages(said: Sequence[Message | str]) -> list[Message]:
        """Returns the words as messages, for a chat template. Raises AgentError for text."""
        if texts := [each for each in said if isinstance(each, str)]:
            raise AgentError(f"{texts[0][:40]!r} is text: with data.chat_template: true, send messages")
        return [each for each in said if isinstance(each, dict)]

    def whole(
        self, messages: Sequence[Message], more: Mapping[str, Any] | None = None, has_ended: bool = False
    ) -> list[int]:
        """Returns the ids of a conversation, up to the model's next turn unless it has ended. Raises AgentError if the
        template refuses it."""
        control = self._tokenizer.control
        dress = self._tokenizer.render_conversation if has_ended else self._tokenizer.render_prompt
        try:
            return self._encoded(dress(control.escape([*messages]), **control.escape(dict(more or {}))), is_hidden=True)
        except ValueError as error:
            raise AgentError(str(error)) from error

    def _tail(self, messages: list[Message], more: Mapping[str, Any] | None = None) -> list[int]:
        """Returns the ids from the end token of the dummy turn, exclusive, to the start of the model's next turn."""
        key = json.dumps(more or {}, default=str)
        if key not in self._bases:
            if len(self._bases) >= MOST_BASES:
                self._bases.clear()
            self._bases[key] = self.whole(self._dummy, more, has_ended=True)
        base, full = self._bases[key], self.whole([*self._dummy, *messages], more)
        if full[: len(base)] != base:
            raise AgentError("it formats earlier turns differently once later ones follow")
        after = 0 if self._end is None else base[::-1].index(self._end)
        return base[len(base) - after :] + full[len(base) :]

    @cached_property
    def _end(self) -> int | None:
        """Token that ends a turn, the last special one of the dummy's; None if the start of the next turn ends it."""
        before, base = self.whole(self._dummy[:1]), self.whole(self._dummy, has_ended=True)
        same = next((i for i, (a, b) in enumerate(zip(before, base)) if a != b), len(before))
        special = {self._tokenizer.eos_id, *self._tokenizer.hf.added_tokens_decoder}
        return next((token for token in reversed(base[same:]) if token in special), None)

    @cached_property
    def _dummy(self) -> list[Message]:
        """The dummy turn, with a call and thoughts if the template supports them."""
        try:
            self.whole(_DUMMY, has_ended=True)
        except AgentError:
            return _PLAIN
        return _DUMMY

    def _encoded(self, text: str, is_hidden: bool = False) -> list[int]:
        """Encodes text; names of control tokens in an environment's words become text."""
        control = self._tokenizer.control
        hidden = text if is_hidden else control.escape(text)
        ids = control.encode(hidden)
        if ids is None:
            if hidden != control.unescape(hidden):
                raise AgentError("the environment's text contains a control token, which would be tokenized as such")
            [ids] = self._tokenizer.encode_plain([hidden])
        return ids
