"""Trajectories: turns of the model and words of an environment, as one sequence of tokens that only grows.

Turns go in waves: all trajectories that ask for one are sampled together, then their environments go on. Which tokens a
trajectory gets does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from mrl.agents.errors import AgentError
from mrl.agents.pool import Message, Pool
from mrl.agents.suffix import Suffix
from mrl.config.schema import AgentConfig
from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.data import Tokenizer
from mrl.rollout.seeds import sample_seed

TURN_STREAM, WORLD_STREAM = 1 << 45, 1 << 46  # keep the seeds of later turns and of environments apart from samples'

Generate = Callable[[list[Request], SamplingParams], list[Sample]]
OnSamples = Callable[[list[Sample]], None]
More = Callable[[bool], list[Request]]  # further ones, to be waited for if it is said


@dataclass
class Trajectory:
    """One sample in the making. faults: how often it was begun anew."""

    request: Request
    faults: int = 0
    ids: list[int] = field(default_factory=list)  # after the prompt
    drawn: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[Sample] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"sample {self.request.sample_id} (data row {self.request.prompt.index})"

    def next_request(self) -> Request:
        prompt, turn = self.request.prompt, len(self.turns)
        seed = self.request.seed if turn == 0 else sample_seed(self.request.seed, TURN_STREAM, turn)
        so_far = Prompt(prompt.index, (*prompt.token_ids, *self.ids), {})
        return Request(self.request.sample_id, self.request.group, so_far, seed)

    def hear(self, words: list[Any], ids: list[int]) -> None:
        """An environment's words, which nothing is learnt of."""
        self.ids += ids
        self.drawn += [False] * len(ids)
        self.messages += [{"role": "environment", "content": each} if isinstance(each, str) else each for each in words]

    def take(self, turn: Sample, text: str) -> Message:
        """A turn of the model's; what its program is told of it."""
        number, ids = len(self.turns), turn.response_ids.tolist()
        self.ids += ids
        self.drawn += [True] * len(ids)
        self.log_probs += turn.log_probs.tolist()
        self.turns.append(turn)
        self.messages.append({"role": "assistant", "content": text})
        return {"turn": {"text": text, "ids": ids, "finish": turn.finish_reason, "number": number}}

    def sample(self, scores: dict[str, float]) -> Sample:
        if not self.turns:
            raise AgentError(f"agent.rollout ended {self.name} before the model had a turn")
        return Sample(
            self.request,
            np.array(self.ids),
            np.array(self.log_probs),
            self.turns[-1].finish_reason,
            self.turns[-1].weight_version,
            response_text=self.messages[-1]["content"],
            drawn=np.array(self.drawn),
            versions=self._versions(),
            messages=self.messages,
            environment=scores,
        )

    def _versions(self) -> np.ndarray | None:
        each = [turn.versions for turn in self.turns if turn.versions is not None]
        return np.concatenate(each) if each else None


class Agents:
    """Plays trajectories with the program of `cfg`, in processes of their own. Close it.

    stops: tokens that end a turn. is_chat: the model is talked to by its chat template
    Raises AgentError if the program cannot be loaded, or the template does not allow several turns.
    """

    def __init__(self, cfg: AgentConfig, tokenizer: Tokenizer, stops: tuple[int, ...], is_chat: bool) -> None:
        self.cfg, self._tokenizer = cfg, tokenizer
        self.suffix = Suffix(tokenizer, stops, is_chat)
        self._is_chat, self._numbers = is_chat, count()
        setup = {"rollout": cfg.rollout, "parser": cfg.parser, "sandbox": cfg.sandbox.model_dump()}
        self._pool = Pool(setup, cfg.workers, cfg.step_timeout_s)

    def close(self) -> None:
        self._pool.close()

    def sample(
        self, requests: list[Request], params: SamplingParams, generate: Generate, on_samples: OnSamples
    ) -> list[Sample]:
        """One sample a request, in their order; `on_samples` gets those that finish together. Raises as `play`."""
        samples: list[Sample] = []
        todo = [requests]

        def finished(some: list[Sample]) -> None:
            samples.extend(some)
            on_samples(some)

        self.play(lambda waits: todo.pop() if todo else [], params, generate, finished)
        return sorted(samples, key=lambda sample: sample.request.sample_id)

    def play(self, more: More, params: SamplingParams, generate: Generate, on_samples: OnSamples) -> None:
        """Plays all that `more` gives, until that is nothing when nothing else is played; sample ids are unique.
        Raises AgentError for a trajectory that has failed more than `retries` times, and what `generate` raises."""
        self._pool.drop()
        live: dict[int, Trajectory] = {}
        messages: dict[int, Message] = {}
        while True:
            for request in more(not live):
                self._begin(Trajectory(request), live, messages)
            if not live:
                return
            answers, messages = self._pool.exchange(messages), {}
            done: list[Sample] = []
            asking: dict[int, int] = {}  # by sample
            for number, answer in answers.items():
                trajectory = live[number]
                if "done" in answer:
                    done.append(live.pop(number).sample(answer["done"]))
                elif "say" not in answer:
                    self._begin(self._failed(live.pop(number), answer), live, messages)
                elif why := self._over(trajectory, answer["say"], params.max_new_tokens):
                    messages[number] = {"over": why}
                else:
                    asking[trajectory.request.sample_id] = number
            if done:
                on_samples(done)
            if asking:
                turns = generate([live[number].next_request() for number in asking.values()], params)
                texts = self._tokenizer.decode_all([turn.response_ids for turn in turns])
                for turn, text in zip(turns, texts, strict=True):
                    number = asking[turn.request.sample_id]
                    messages[number] = live[number].take(turn, text)

    def _begin(self, trajectory: Trajectory, live: dict[int, Trajectory], messages: dict[int, Message]) -> None:
        number, request = next(self._numbers), trajectory.request
        live[number] = trajectory
        seed = sample_seed(request.seed, WORLD_STREAM, 0)
        messages[number] = {"start": {"row": request.prompt.row, "prompt": request.prompt.text, "seed": seed}}

    def _failed(self, trajectory: Trajectory, answer: Message) -> Trajectory:
        """What is begun anew in its place, with the same seeds."""
        faults = trajectory.faults + 1
        if faults > self.cfg.retries:
            what = answer.get("fault") or f"raised:\n{answer.get('error')}"
            raise AgentError(
                f"agent.rollout {self.cfg.rollout!r} on {trajectory.name} {what}\n(begun {faults} times: agent.retries)"
            )
        return Trajectory(trajectory.request, faults)

    def _over(self, trajectory: Trajectory, words: list[Any], turn_tokens: int) -> str | None:
        """Takes in what was said before the next turn; why there is none, if so."""
        if not trajectory.turns:
            if words:
                raise AgentError("agent.rollout speaks before the model's first turn: the data's prompt does that")
            return None
        if len(trajectory.turns) >= self.cfg.max_turns:
            return f"agent.max_turns = {self.cfg.max_turns}"
        if self._is_chat and trajectory.turns[-1].finish_reason == "length":
            return "the last turn was cut off (rollout.sampling.max_new_tokens)"
        ids = self.suffix(words, trajectory.ids[-1])
        if ids is None:
            return "the last turn has no end"
        room = self.cfg.max_tokens - len(trajectory.request.prompt.token_ids) - len(trajectory.ids)
        if len(ids) + turn_tokens > room:
            return f"agent.max_tokens = {self.cfg.max_tokens}"
        trajectory.hear(words, ids)
        return None
