"""Tokens of a conversation that the assistant generates, up to the token that ends each of its turns.

A chat template may mark them ({% generation %} ... {% endgeneration %}). Otherwise they are the differences between
renderings of growing prefixes of the conversation, if each rendering begins with the previous one. A template that
renders earlier turns differently once there are later ones (Qwen3 drops their thinking) allows training on the last
turn only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mrl.config.schema import SFTDataConfig
from mrl.data.columns import messages_of
from mrl.data.encoder import Encoder
from mrl.data.rows import Row

Span = tuple[int, int]  # of characters or tokens: the first, and the one after the last
LAST_ONLY = "set data.train_on: last to train on the last turn only"


@dataclass(frozen=True)
class Conversation:
    """Token ids of a conversation; spans: token spans of the assistant's turns; weights: loss weight of each span.

    as_text, as_control: as in `RenderedPrompt`
    """

    ids: list[int]
    spans: list[Span]
    weights: list[float]
    as_text: str | None = None
    as_control: str | None = None


class AssistantTurns:
    """Turns of conversations that the data section selects for training."""

    def __init__(self, encoder: Encoder, cfg: SFTDataConfig) -> None:
        self.encoder, self._cfg, self._tokenizer = encoder, cfg, encoder.tokenizer

    def conversation(self, messages: list[Row], weights: Sequence[float], template_variables: Row) -> Conversation:
        """Encodes a conversation.

        Args:
            weights: of each message; 0: not trained.
            template_variables: further variables of the chat template.

        Raises ValueError for a conversation that the chat template refuses, or whose turns cannot be located.
        """
        messages = messages_of(messages)
        control = self._tokenizer.control
        name = control.first_in([messages, template_variables])
        said = messages if name is None else control.escape(messages)
        whole = self._tokenizer.render_conversation(messages, **template_variables)
        if reserved := control.reserved_in(whole):
            raise ValueError(f"it contains the character U+{ord(reserved):X}, which mrl reserves for control tokens")
        template_variables = template_variables if name is None else control.escape(template_variables)
        text = whole if name is None else self._tokenizer.render_conversation(said, **template_variables)
        if name is not None and control.unescape(text) != whole:
            raise ValueError(f"the chat template searches messages for {name!r}: its turns cannot be located")
        learnt = self._learnt(messages, weights)
        spans = self._spans(said, text, learnt, template_variables) if learnt else []
        ids, places = self._tokenizer.encode_with_spans(text, spans)
        ended = [self._ended(ids, place) for place in places]
        return Conversation(ids, ended, [weights[i] for i in learnt], as_text=name)

    def _learnt(self, messages: list[Row], weights: Sequence[float]) -> list[int]:
        """Returns the numbers of the messages whose turns are trained."""
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        last = turns[-1:] if self._cfg.train_on == "last" else turns
        return [i for i in last if weights[i] > 0]

    def _spans(self, messages: list[Row], text: str, learnt: list[int], template_variables: Row) -> list[Span]:
        """Returns character spans of these messages in the whole text."""
        if not self._tokenizer.has_generation_marks:
            return [self._difference(messages, text, i, template_variables) for i in learnt]
        for i in learnt:
            self._after(messages, text, i, template_variables)
        marked, spans = self._tokenizer.render_marked_conversation(messages, **template_variables)
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if marked != text or len(spans) != len(turns):
            counts = f"{len(spans)} parts of a conversation with {len(turns)} assistant turns"
            raise ValueError(f"the chat template marks {counts} with {{% generation %}}")
        return [spans[turns.index(i)] for i in learnt]

    def _difference(self, messages: list[Row], text: str, i: int, template_variables: Row) -> Span:
        """Returns the span that message i adds to the conversation before it, for a template without marks."""
        before, after = (
            self._tokenizer.render_prompt(messages[:i], **template_variables),
            self._after(messages, text, i, template_variables),
        )
        if not text.startswith(before) or len(before) > after:
            raise ValueError("the chat template formats a finished turn differently from its generation prompt")
        return len(before), after

    def _after(self, messages: list[Row], text: str, i: int, template_variables: Row) -> int:
        """Returns the number of characters of the whole text up to the end of message i."""
        beginning = self._tokenizer.render_conversation(messages[: i + 1], **template_variables)
        if not text.startswith(beginning):
            raise ValueError(f"the chat template formats earlier turns differently once later ones follow: {LAST_ONLY}")
        return len(beginning)

    def _ended(self, ids: list[int], span: Span) -> Span:
        """Cuts the span after the token that ends the turn: without that token, the model would never learn to stop. A
        template such as GLM's ends a turn with the token that begins the next one, which is added to the last turn.
        """
        first, after = span
        if not self._tokenizer.has_generation_marks and (follows := self._tokenizer.next_turn_token) is not None:
            if after == len(ids):
                ids.append(follows)
            if ids[after] in self._tokenizer.end_tokens:
                return first, after + 1
        ends = [place for place in range(first, after) if ids[place] in self._tokenizer.end_tokens]
        if ends and not self._tokenizer.decode(ids[ends[-1] + 1 : after], special=True).strip():
            return first, ends[-1] + 1
        shown = self._tokenizer.decode(ids[max(first, after - 3) : after], special=True)
        raise ValueError(
            f"the chat template ends a turn with {shown!r}, which has no end token, so the model would not learn to "
            f"stop: set model.chat_template to a template that ends turns with {self._tokenizer.hf.eos_token!r}"
        )
