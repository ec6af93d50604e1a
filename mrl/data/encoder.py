"""Encoder: a row -> the tokens of its prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from mrl.config.schema import DataConfig
from mrl.data.columns import conversation, messages_of, read_template_variables
from mrl.data.errors import DataError
from mrl.data.image_prompts import with_image_text
from mrl.data.rows import Row
from mrl.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mrl.data.image_processor import ImageProcessor

_MARK = "\uf8ff"  # private-use character without meaning
MIN_TURN_CHARS = 3


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt after the chat template, ready to be tokenised.

    ids: token ids if already known. as_text, as_control: name of a control token in the row that is encoded as text, or
    as the control token
    """

    text: str
    ids: list[int] | None = None
    as_text: str | None = None
    as_control: str | None = None


class Encoder:
    """Encodes prompts as the data section says. Raises DataError if a chat template is required and there is none.

    image_processor: image processor of a vision-language model
    """

    def __init__(self, cfg: DataConfig, tokenizer: Tokenizer, image_processor: ImageProcessor | None = None) -> None:
        if cfg.chat_template and not tokenizer.has_chat_template:
            raise DataError("data.chat_template is true, but the tokenizer has no chat template: set it to false")
        if image_processor is not None:
            image_processor.check_tokenizer(tokenizer)
        self.cfg, self.tokenizer, self.image_processor = cfg, tokenizer, image_processor

    def text(self, row: Row) -> str:
        """Returns the text to tokenise. Raises ValueError for a conversation that the chat template refuses."""
        if self.cfg.chat_template:
            return self.tokenizer.render_prompt(self.messages(row), **read_template_variables(row, self.cfg))
        return with_image_text(row[self.cfg.prompt_key], self.num_pictures(row))

    def num_pictures(self, row: Row) -> int | None:
        """Returns the number of images of a row; None for a text-only model. Raises ImageError for too many."""
        return None if self.image_processor is None else len(self.image_processor.values(row))

    def messages(self, row: Row) -> list[Row]:
        """Returns the prompt's messages as the chat template receives them."""
        return conversation(row[self.cfg.prompt_key], row, self.cfg, self.num_pictures(row))

    def render(self, row: Row, with_answer: bool = False) -> RenderedPrompt:
        """Returns the prompt. Control tokens in the messages of a conversation become text if the tokenizer supports
        it.

        with_answer: report the answer's control tokens too
        """
        prompt = self._render(row)
        if not with_answer:
            return prompt
        answer = self.answer_of(row[self.cfg.answer_key])
        as_text, as_control = answer.as_text or prompt.as_text, answer.as_control or prompt.as_control
        return replace(prompt, as_text=as_text, as_control=as_control)

    def _render(self, row: Row) -> RenderedPrompt:
        if not self.cfg.chat_template:
            return self.text_of(self.text(row))
        messages, template_variables, render = (
            self.messages(row),
            read_template_variables(row, self.cfg),
            self.tokenizer.render_prompt,
        )
        return self._conversation(messages, render(messages, **template_variables), render, template_variables)

    def text_of(self, text: str) -> RenderedPrompt:
        """Returns the text without a chat template."""
        return RenderedPrompt(text, as_control=self.tokenizer.control.first_in(text))

    def answer_of(self, text: str) -> RenderedPrompt:
        """Returns an answer, or a part of one, as `answers` tokenises it."""
        name = self.tokenizer.control.first_in(text)
        return RenderedPrompt(text, as_text=name) if self.cfg.chat_template else RenderedPrompt(text, as_control=name)

    def conversation(self, messages: list[Row] | str, template_variables: Row, is_whole: bool) -> RenderedPrompt:
        """Returns messages as `render` does: with `is_whole` to the end of the last message, otherwise up to the start
        of the next answer. template_variables: further variables of the chat template. Raises ValueError for a
        conversation that the chat template refuses.
        """
        said, render = (
            messages_of(messages),
            self.tokenizer.render_conversation if is_whole else self.tokenizer.render_prompt,
        )
        return self._conversation(said, render(said, **template_variables), render, template_variables)

    def _conversation(
        self, messages: list[Row], text: str, render: Callable[..., str], template_variables: Row
    ) -> RenderedPrompt:
        """Handles control tokens in the messages. text: result of `render` for the messages"""
        control = self.tokenizer.control
        name = control.first_in([messages, template_variables])
        if name is None:
            return RenderedPrompt(text, as_control=self._turn if self._turn and _holds(messages, self._turn) else None)
        try:
            hidden = render(control.escape(messages), **control.escape(template_variables))
        except ValueError:  # a template that looks for the names
            return RenderedPrompt(text, as_control=name)
        ids = control.encode(hidden) if control.unescape(hidden) == text else None
        return RenderedPrompt(text, as_control=name) if ids is None else RenderedPrompt(text, ids, as_text=name)

    def ids(self, prompts: list[RenderedPrompt]) -> list[list[int]]:
        """Returns the ids of whole prompts, of any length."""
        encode = self.tokenizer.encode_plain if self.cfg.chat_template else self.tokenizer.encode_prompts
        encoded = encode([prompt.text for prompt in prompts])
        return [ids if prompt.ids is None else prompt.ids for prompt, ids in zip(prompts, encoded, strict=True)]

    def answers(self, texts: list[str]) -> list[list[int]]:
        """Returns ids without EOS; under a chat template, control tokens in answers are text too."""
        encoded, control = self.tokenizer.encode_plain(texts), self.tokenizer.control
        if self.cfg.chat_template:
            for place, text in enumerate(texts):
                if control.first_in(text) and not control.reserved_in(text):
                    encoded[place] = control.encode(control.escape(text)) or encoded[place]
        return encoded

    def cut(self, ids: list[int]) -> list[int]:
        """Truncates ids to data.max_prompt_tokens, special ones included: "left" keeps the end, "right" the beginning,
        "middle" both, with the larger half at the end.
        """
        limit = self.cfg.max_prompt_tokens
        head = {"left": 0, "middle": limit // 2, "right": limit}[self.cfg.truncation]
        return [*ids[:head], *ids[len(ids) - limit + head :]]

    @cached_property
    def _turn(self) -> str | None:
        """Plain text that ends a user's turn in the chat template; None if a control token ends it."""
        try:
            end = self.tokenizer.render_prompt([{"role": "user", "content": _MARK}]).rpartition(_MARK)[2].strip()
        except ValueError:
            return None
        return end if len(end) >= MIN_TURN_CHARS and self.tokenizer.control.first_in(end) is None else None


def _holds(messages: list[Row], words: str) -> bool:
    return any(isinstance(text := message["content"], str) and words in text for message in messages)
