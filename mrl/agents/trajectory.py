"""A trajectory in the making: turns of the model and what was said between them, as sequences of tokens that only grow.

Mostly it is one sequence. Another one begins where the history is written anew: thoughts that a template takes back, or
a harness that sends other messages than it has been answered.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mrl.agents.errors import AgentError
from mrl.agents.pool import Message
from mrl.agents.suffix import Suffix
from mrl.core import Prompt, Request, Sample
from mrl.rollout.routed import joined, whole
from mrl.rollout.seeds import sample_seed

TURN_STREAM, CHAT_STREAM = 1 << 45, 1 << 47  # keep the seeds of later turns and of chats apart from samples'


@dataclass
class Line:
    """A sequence. prompt: what it begins with, of which nothing is learnt; ids: what follows; log_probs, rewards,
    versions: of those that are drawn; experts: as in `Sample`, of all tokens but the last, if they are asked for"""

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

    def hear(self, ids: Sequence[int]) -> None:
        """What nothing is learnt of."""
        self.ids += ids
        self.drawn += [False] * len(ids)

    def take(self, turn: Sample) -> None:
        """A turn of the model's."""
        ids = turn.response_ids.tolist()
        self.ids += ids
        self.drawn += [True] * len(ids)
        self.log_probs += turn.log_probs.tolist()
        self.rewards += [0.0] * len(ids)
        if turn.versions is not None:
            self.versions.append(turn.versions)
        self.experts = joined(self.experts, turn.experts)


@dataclass(frozen=True)
class Node:
    """Where a chat has been: all messages up to an answer, which is the last of `messages`, and so many tokens of a
    line. last: of them; is_whole: the answer was not cut off"""

    messages: list[Message]
    tools: list[Message]
    line: Line
    length: int
    last: int
    is_whole: bool


@dataclass(frozen=True)
class Next:
    """What the next turn is drawn after: `said` at the end of a line (one of the trajectory's, or a new one), which are
    the tokens of `words`. chat: the messages and tools of a request for it"""

    line: Line
    said: Sequence[int]
    words: Sequence[Any] = ()
    chat: Message | None = None


@dataclass
class Trajectory:
    """Turns and words of one sample. faults: how often it was begun anew; ends_at: by the monotonic clock, it is late
    after that"""

    request: Request
    faults: int = 0
    ends_at: float = math.inf
    lines: list[Line] = field(default_factory=list)
    turns: list[Sample] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    next: Next | None = None
    asked: dict[int, int] = field(default_factory=dict)  # how often a chat was after the same tokens
    offered: tuple[Next, Sample] | None = None  # an answer of a chat that may not have arrived
    _last: Line | None = None  # which has the last turn

    @property
    def name(self) -> str:
        return f"sample {self.request.sample_id} (data row {self.request.prompt.index})"

    def limit(self, seconds: float | None) -> None:
        """From now on."""
        self.ends_at = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.ends_at

    def next_request(self) -> Request:
        """For the turn that `next` says."""
        assert self.next is not None
        prompt, line = self.request.prompt, self.next.line
        ids, known = (*line.all_ids, *self.next.said), 0 if line.experts is None else len(line.experts)
        return replace(self.request, prompt=Prompt(prompt.index, ids, {}), seed=self._seed(ids), experts_from=known)

    def _seed(self, ids: Sequence[int]) -> int:
        """Of a chat by what is before it: requests that come at once are answered the same in any order."""
        assert self.next is not None
        seed, turn = self.request.seed, len(self.turns)
        if self.next.chat is None:
            return seed if turn == 0 else sample_seed(seed, TURN_STREAM, turn)
        number = _digest(ids)
        return sample_seed(seed, CHAT_STREAM + self.asked.get(number, 0), number)

    def take(self, turn: Sample, text: str, shown: str | None = None) -> Message:
        """Adds the turn that was drawn after `next`; returns what the program is told of it. shown: its text with
        special tokens, for a parser that reads them"""
        assert self.next is not None and self.next.chat is None
        self._add(self.next, turn, {"role": "assistant", "content": text})
        ids = turn.response_ids.tolist()
        told = {"text": text, "shown": shown, "ids": ids, "finish": turn.finish_reason}
        return {"turn": {**told, "number": len(self.turns) - 1}}

    def _add(self, after: Next, turn: Sample, message: Message) -> None:
        self.messages += [*map(_written, after.words), message]
        line = after.line
        if all(line is not each for each in self.lines):
            self.lines.append(line)
        line.hear(after.said)
        line.take(turn)
        self.turns.append(turn)
        self._last = line

    def reward(self, value: float) -> None:
        """What was given after the last turn; before the first one it is of the whole."""
        if self._last is not None and value:
            self._last.rewards[-1] += value

    # ---- chats

    def follow(self, chat: Message, suffix: Suffix) -> Next:
        """Where a request's turn is drawn: after the longest conversation before it that its messages go on with, by
        the tokens of that, or else in a sequence of its own. Raises AgentError for what the template cannot show."""
        messages, tools = chat["messages"], chat["tools"]
        more = {"tools": tools} if tools else {}
        known = [node for node in self.nodes if node.tools == tools and _begins(messages, node.messages)]
        if known:
            node = max(known, key=lambda each: len(each.messages))
            new = messages[len(node.messages) :]
            try:
                said = suffix(new, node.last, more) if node.is_whole else None
            except AgentError:  # such as messages that another one has answered
                said = None
            if said is not None:
                if node.length == len(node.line):
                    return Next(node.line, said, new, chat)
                return Next(Line((*node.line.all_ids[: node.length], *said)), (), new, chat)
        return Next(Line(tuple(suffix.whole(messages, more))), (), messages, chat)

    def offer(self, turn: Sample, text: str, shown: str | None = None) -> Message:
        """The answer to a chat, which counts once it has arrived; what the harness is told of it."""
        assert self.next is not None
        self.offered = self.next, turn
        tokens = [len(self.next.line) + len(self.next.said), len(turn.response_ids)]
        return {"answer": {"text": text, "shown": shown, "finish": turn.finish_reason, "tokens": tokens}}

    def settle(self, message: Message | None) -> None:
        """As what the answer that was offered last, if there was one, has arrived; None: it has not."""
        if self.offered is None:
            return
        (after, turn), self.offered = self.offered, None
        if message is None:
            return
        assert after.chat is not None
        number = _digest((*after.line.all_ids, *after.said))
        self.asked[number] = self.asked.get(number, 0) + 1
        self._add(after, turn, message)
        whole = [*after.chat["messages"], message]
        end, is_whole = int(turn.response_ids[-1]), turn.finish_reason == "stop"
        self.nodes.append(Node(whole, after.chat["tools"], after.line, len(after.line), end, is_whole))

    # ---- the end

    def sample(self, scores: dict[str, float], by_turn: bool) -> Sample:
        """by_turn: with what was given after each turn."""
        first, *others = self.lines
        ids = [*first.ids, *(i for line in others for i in line.all_ids)]
        drawn = [*first.drawn, *(d for line in others for d in ([False] * len(line.prompt) + line.drawn))]
        versions = [each for line in self.lines for each in line.versions]
        rewards = np.array([value for line in self.lines for value in line.rewards], dtype=np.float32)
        experts = [whole(line.experts) for line in self.lines if line.experts is not None]
        texts = [m["content"] for m in self.messages if m["role"] == "assistant"]
        return Sample(
            replace(self.request, prompt=replace(self.request.prompt, token_ids=first.prompt)),
            np.array(ids),
            np.array([value for line in self.lines for value in line.log_probs]),
            self.turns[-1].finish_reason,
            self.turns[-1].weight_version,
            response_text=texts[-1] or "",
            drawn=np.array(drawn),
            versions=np.concatenate(versions) if versions else None,
            experts=np.concatenate(experts) if experts else None,
            messages=self.messages,
            environment=scores,
            sequence_lens=tuple(map(len, self.lines)) if others else (),
            rewards=rewards if by_turn else None,
        )


def _digest(ids: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(np.array(ids, dtype=np.int32).tobytes(), digest_size=6).digest())


def _written(word: Any) -> Message:
    """As it is written down: an answer in a history that is shown anew is not one of the model's turns."""
    if isinstance(word, str):
        return {"role": "environment", "content": word}
    return {**word, "role": "given answer"} if word["role"] == "assistant" else dict(word)


def _begins(messages: list[Message], first: list[Message]) -> bool:
    return len(messages) > len(first) and messages[: len(first)] == first
