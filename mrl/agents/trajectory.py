"""Trajectory in progress: turns of the model and the words between them, as token sequences that only grow.

Usually it is one sequence. A new sequence begins when the history is rewritten: by a template that drops thoughts, or a
harness that sends other messages than it received.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mrl.agents import AgentError
from mrl.agents.chat import Message
from mrl.agents.suffix import Suffix
from mrl.core import Prompt, Request, Sample
from mrl.inference.routed import joined, whole
from mrl.inference.seeds import sample_seed

TURN_STREAM, CHAT_STREAM = 1 << 45, 1 << 47  # keep the seeds of later turns and of chats apart from samples'


@dataclass
class TokenSequence:
    """One token sequence. prompt: its first tokens, which are not trained on; ids: the following tokens; drawn: action
    mask of `ids`; log_probs, rewards, versions: of generated tokens; experts: as in `Sample`, of all tokens but the
    last, if requested
    """

    prompt: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    experts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.ids)

    @property
    def all_ids(self) -> tuple[int, ...]:
        return (*self.prompt, *self.ids)

    def append(self, context: Sequence[int], turn: Sample) -> None:
        """Appends tokens that are not trained on, and a turn of the model."""
        ids = turn.response_ids.tolist()
        self.ids += [*context, *ids]
        self.drawn += [False] * len(context) + [True] * len(ids)
        self.log_probs += turn.log_probs.tolist()
        self.rewards += [0.0] * len(ids)
        if turn.token_weight_versions is not None:
            self.versions.append(turn.token_weight_versions)
        self.experts = joined(self.experts, turn.routed_experts)


@dataclass(frozen=True)
class ChatState:
    """A chat up to an answer, as the first `length` tokens of a sequence. is_whole: the answer was not truncated"""

    messages: list[Message]
    tools: list[Message]
    sequence: TokenSequence
    length: int
    is_whole: bool


@dataclass(frozen=True)
class TurnPosition:
    """Position of the next turn: after a sequence (the trajectory's, or a new one) and the tokens `said` of `words`.
    chat: its request's messages and tools"""

    sequence: TokenSequence
    said: Sequence[int]
    words: Sequence[Any] = ()
    chat: Message | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens before the turn."""
        return (*self.sequence.all_ids, *self.said)


@dataclass
class Trajectory:
    """Turns and words of one sample. ends_at: deadline by the monotonic clock"""

    request: Request
    ends_at: float = math.inf
    sequences: list[TokenSequence] = field(default_factory=list)
    turns: list[Sample] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    chat_states: list[ChatState] = field(default_factory=list)
    next: TurnPosition | None = None
    asked: dict[int, int] = field(default_factory=dict)  # number of chats after the same tokens
    offered: tuple[TurnPosition, Sample] | None = None  # an answer of a chat that may not have arrived
    _last: TokenSequence | None = None  # sequence of the last turn

    def next_request(self) -> Request:
        """Returns the request for the turn at `next`."""
        assert self.next is not None
        ids, experts, seed = self.next.token_ids, self.next.sequence.experts, self.request.seed
        if self.next.chat is not None:  # concurrent requests get the same answers in any order
            number = _digest(ids)
            seed = sample_seed(seed, CHAT_STREAM + self.asked.get(number, 0), number)
        elif self.turns:
            seed = sample_seed(seed, TURN_STREAM, len(self.turns))
        known = 0 if experts is None else len(experts)
        prompt = Prompt(self.request.prompt.index, ids, {})
        return replace(self.request, prompt=prompt, seed=seed, routed_experts_start=known)

    def take(self, turn: Sample, text: str, shown: str | None = None) -> Message:
        """Adds the turn that was generated at `next`; returns the message for the program. shown: text for the parser,
        if that needs special tokens"""
        assert self.next is not None and self.next.chat is None
        self._add(self.next, turn, {"role": "assistant", "content": text})
        ids = turn.response_ids.tolist()
        told = {"text": text, "shown": shown, "ids": ids, "finish": turn.finish_reason}
        return {"turn": {**told, "number": len(self.turns) - 1}}

    def _add(self, after: TurnPosition, turn: Sample, message: Message) -> None:
        self.messages += [*map(_written, after.words), message]
        sequence = after.sequence
        if all(sequence is not each for each in self.sequences):
            self.sequences.append(sequence)
        sequence.append(after.said, turn)
        self.turns.append(turn)
        self._last = sequence

    def reward(self, value: float) -> None:
        """Adds a reward given after the last turn; rewards before the first turn count for the whole trajectory."""
        if self._last is not None and value:
            self._last.rewards[-1] += value

    # ---- chats

    def follow(self, chat: Message, suffix: Suffix) -> TurnPosition:
        """Returns the position of a request's turn: after the longest earlier conversation that its messages extend,
        with the tokens of that, or else in a sequence of its own. Raises AgentError for messages that the template
        cannot render.
        """
        messages, tools = chat["messages"], chat["tools"]
        more = {"tools": tools} if tools else {}
        known = [
            state
            for state in self.chat_states
            if state.tools == tools and messages[: len(state.messages)] == state.messages != messages
        ]
        if known:
            state = max(known, key=lambda each: len(each.messages))
            new, ids = messages[len(state.messages) :], state.sequence.all_ids[: state.length]
            try:
                said = suffix(new, ids[-1], more) if state.is_whole else None
            except AgentError:  # such as messages that another one has answered
                said = None
            if said is not None:
                if state.length == len(state.sequence):
                    return TurnPosition(state.sequence, said, new, chat)
                return TurnPosition(TokenSequence((*ids, *said)), (), new, chat)
        return TurnPosition(TokenSequence(tuple(suffix.whole(messages, more))), (), messages, chat)

    def offer(self, turn: Sample, text: str, shown: str | None = None) -> Message:
        """Returns the answer to a chat for the harness; the turn counts once the answer has arrived."""
        assert self.next is not None
        self.offered = self.next, turn
        tokens = [len(self.next.token_ids), len(turn.response_ids)]
        return {"answer": {"text": text, "shown": shown, "finish": turn.finish_reason, "tokens": tokens}}

    def settle(self, message: Message | None) -> None:
        """Adds the turn of the last offered answer, if any, as the message that has arrived; None: it has not."""
        offered, self.offered = self.offered, None
        if offered is None or message is None:
            return
        after, turn = offered
        assert after.chat is not None
        number = _digest(after.token_ids)
        self.asked[number] = self.asked.get(number, 0) + 1
        self._add(after, turn, message)
        messages, is_whole = [*after.chat["messages"], message], turn.finish_reason == "stop"
        state = ChatState(messages, after.chat["tools"], after.sequence, len(after.sequence), is_whole)
        self.chat_states.append(state)

    # ---- the end

    def sample(self, scores: dict[str, float], by_turn: bool) -> Sample:
        """Returns the finished sample. scores: of the environment; by_turn: include the rewards of each turn"""
        first, *others = self.sequences
        ids = [*first.ids, *(i for sequence in others for i in sequence.all_ids)]
        drawn = [*first.drawn, *(d for sequence in others for d in ([False] * len(sequence.prompt) + sequence.drawn))]
        versions = [each for sequence in self.sequences for each in sequence.versions]
        rewards = np.array([value for sequence in self.sequences for value in sequence.rewards], dtype=np.float32)
        experts = [whole(sequence.experts) for sequence in self.sequences if sequence.experts is not None]
        texts = [m["content"] for m in self.messages if m["role"] == "assistant"]
        return Sample(
            replace(self.request, prompt=replace(self.request.prompt, token_ids=first.prompt)),
            np.array(ids),
            np.array([value for sequence in self.sequences for value in sequence.log_probs]),
            self.turns[-1].finish_reason,
            self.turns[-1].weight_version,
            response_text=texts[-1] or "",
            action_mask=np.array(drawn),
            token_weight_versions=np.concatenate(versions) if versions else None,
            routed_experts=np.concatenate(experts) if experts else None,
            messages=self.messages,
            environment=scores,
            sequence_lens=tuple(map(len, self.sequences)) if others else (),
            token_rewards=rewards if by_turn else None,
        )


def _digest(ids: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(np.array(ids, dtype=np.int32).tobytes(), digest_size=6).digest())


def _written(word: Any) -> Message:
    """Returns a word as recorded: an answer in a rewritten history is not one of the model's turns."""
    if isinstance(word, str):
        return {"role": "environment", "content": word}
    return {**word, "role": "given answer"} if word["role"] == "assistant" else dict(word)
