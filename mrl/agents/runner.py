"""Trajectories: turns of the model and words of an environment, as one token sequence that only grows.

Turns are sampled in batches: all trajectories that request a turn are sampled together, then their environments
continue. A trajectory's tokens do not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from mrl.agents.errors import AgentError
from mrl.agents.pool import AgentWorkerPool, Message
from mrl.agents.suffix import Suffix
from mrl.agents.tool_call_parsers import WITH_SPECIAL_TOKENS
from mrl.agents.trajectory import TokenSequence, Trajectory, TurnPosition
from mrl.config.schema import AgentConfig
from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.data import Tokenizer, TokenizerError
from mrl.rollout.seeds import sample_seed

DAY_S = 86400.0
BYTES_PER_TOKEN = 16  # longer text is not tokenised: any language has 2 to 6, code that is mostly spaces up to 12
WORLD_STREAM = 1 << 46  # keeps the seeds of environments apart from samples'

Generate = Callable[[list[Request], SamplingParams], list[Sample]]
OnSamples = Callable[[list[Sample]], None]
NextRequests = Callable[[bool], list[Request]]  # returns further requests; argument: wait for them
PromptMessages = Callable[[Prompt], tuple[list[Message], Message]]  # messages, template variables


class AgentRunner:
    """Plays trajectories with the program of `cfg`, in worker processes. Must be closed.

    stops: tokens that end a turn; is_chat: the prompts use a chat template; by_turn: samples have the rewards of each
    turn; begins: messages of a prompt under a chat template, for rewritten histories; turn_timeout_s: longest duration
    of `generate` for one turn batch
    Raises AgentError if the program cannot be loaded, or the template does not allow several turns.
    """

    def __init__(
        self,
        cfg: AgentConfig,
        tokenizer: Tokenizer,
        stops: tuple[int, ...],
        is_chat: bool,
        by_turn: bool = False,
        begins: PromptMessages | None = None,
        turn_timeout_s: float = DAY_S,
    ) -> None:
        self.cfg, self._tokenizer = cfg, tokenizer
        self.suffix = Suffix(tokenizer, stops, is_chat, needed=cfg.thoughts == "keep" and not cfg.endpoint)
        self._is_chat, self._by_turn, self._begins, self._numbers = is_chat, by_turn, begins, count()
        setup: Message = {"rollout": cfg.rollout, "parser": cfg.parser, "sandbox": cfg.sandbox.model_dump()}
        setup |= {"endpoint": cfg.endpoint, "answer_timeout_s": turn_timeout_s + cfg.step_timeout_s}
        setup["max_bytes"] = cfg.max_tokens * BYTES_PER_TOKEN
        self._stops, self._shows_special = stops, cfg.parser in WITH_SPECIAL_TOKENS
        self._pool = AgentWorkerPool(setup, cfg.workers, cfg.step_timeout_s)

    def close(self) -> None:
        self._pool.close()

    def sample(
        self, requests: list[Request], params: SamplingParams, generate: Generate, on_samples: OnSamples
    ) -> list[Sample]:
        """Returns one sample a request, in their order; `on_samples` receives those that finish together. Raises as
        `play`.
        """
        samples: list[Sample] = []
        todo = [requests]

        def finished(some: list[Sample]) -> None:
            samples.extend(some)
            on_samples(some)

        self.play(lambda waits: todo.pop() if todo else [], params, generate, finished)
        return sorted(samples, key=lambda sample: sample.request.sample_id)

    def play(self, more: NextRequests, params: SamplingParams, generate: Generate, on_samples: OnSamples) -> None:
        """Plays all requests from `more`, until it returns none while no trajectory is live; sample ids must be unique.

        A trajectory that has failed more than `retries` times becomes a sample that is `left_out`, or raises
        AgentError, as `on_error` says. Raises the errors of `generate`.
        """
        self._pool.drop()
        live: dict[int, Trajectory] = {}
        messages: dict[int, Message] = {}
        while True:
            for request in more(not live):
                self._begin(Trajectory(request), live, messages)
            if not live:
                return
            ends = {number: trajectory.ends_at for number, trajectory in live.items()}
            answers, messages = self._pool.exchange(messages, ends), {}
            done: list[Sample] = []
            asking: dict[int, int] = {}  # by sample
            for number, answer in answers.items():
                trajectory = live[number]
                trajectory.settle(answer.get("arrived"))
                trajectory.reward(answer.get("reward", 0.0))
                if "done" in answer and trajectory.turns:
                    done.append(live.pop(number).sample(answer["done"], self._by_turn))
                elif "say" not in answer and "chat" not in answer:
                    done += self._failed(live.pop(number), answer, live, messages)
                elif trajectory.is_late:
                    done += self._late(number, live, messages)
                else:
                    try:
                        no = self._no_turn(trajectory, answer, params.max_new_tokens)
                    except (AgentError, TokenizerError) as error:
                        self._pool.end(number)
                        done += self._failed(live.pop(number), {"error": str(error)}, live, messages)
                        continue
                    if no is not None:
                        messages[number] = no
                    else:
                        asking[trajectory.request.sample_id] = number
            if done:
                on_samples(done)
            if asking:
                turns = generate([live[number].next_request() for number in asking.values()], params)
                if left_out := self._pass_turns(turns, asking, live, messages):
                    on_samples(left_out)

    def _pass_turns(
        self, turns: list[Sample], asking: dict[int, int], live: dict[int, Trajectory], messages: dict[int, Message]
    ) -> list[Sample]:
        """Passes each turn to its trajectory, unless that is late; returns the samples that are left out."""
        left_out: list[Sample] = []
        texts = self._tokenizer.decode_all([turn.response_ids for turn in turns])
        for turn, text in zip(turns, texts, strict=True):
            number = asking[turn.request.sample_id]
            if live[number].is_late:
                left_out += self._late(number, live, messages)
            else:
                tell = live[number].offer if self.cfg.endpoint else live[number].take
                messages[number] = tell(turn, text, self._shown(turn) if self._shows_special else None)
        return left_out

    def _shown(self, turn: Sample) -> str:
        """Returns the text of a turn with its special tokens, without the one that ended it."""
        ids = turn.response_ids.tolist()
        return self._tokenizer.decode(ids[:-1] if ids and ids[-1] in self._stops else ids, special=True)

    def _begin(self, trajectory: Trajectory, live: dict[int, Trajectory], messages: dict[int, Message]) -> None:
        number, request = next(self._numbers), trajectory.request
        live[number] = trajectory
        trajectory.limit(self.cfg.trajectory_timeout_s)
        seed = sample_seed(request.seed, WORLD_STREAM, 0)
        row = request.prompt.row
        start = {
            "row": row,
            "tools": self._tools(request.prompt),
            "prompt": request.prompt.text,
            "seed": seed,
        }
        messages[number] = {"start": start}

    def _failed(
        self, trajectory: Trajectory, answer: Message, live: dict[int, Trajectory], messages: dict[int, Message]
    ) -> list[Sample]:
        """Restarts a trajectory with the same seeds or, after too many failures, returns the sample in its place. A
        failure counts only against the trajectory that caused it, not against others in the same process.
        """
        faults = trajectory.faults + (not answer.get("neighbour"))
        if faults <= self.cfg.retries:
            self._begin(Trajectory(trajectory.request, faults), live, messages)
            return []
        what = answer.get("fault") or f"raised {answer.get('error')}"
        if "done" in answer:
            what = "ended before the model's first turn" + (f": {answer['over']}" if answer["over"] else "")
        why = f"agent.rollout {self.cfg.rollout!r} on {trajectory.name} {what} (attempts: {faults}; agent.retries)"
        why = "\n".join(filter(None, (why, answer.get("traceback", "").rstrip())))
        if self.cfg.on_error == "stop":
            raise AgentError(why)
        return [Sample(trajectory.request, np.zeros(0), np.zeros(0), "abort", "0", left_out=why)]

    def _late(self, number: int, live: dict[int, Trajectory], messages: dict[int, Message]) -> list[Sample]:
        """Fails a late trajectory that waits for its turn."""
        self._pool.end(number)
        why = f"did not finish within {self.cfg.trajectory_timeout_s:g} s (agent.trajectory_timeout_s)"
        return self._failed(live.pop(number), {"fault": why}, live, messages)

    def _no_turn(self, trajectory: Trajectory, answer: Message, turn_tokens: int) -> Message | None:
        """Sets the position of the next turn; returns the message for the program if there is no next turn."""
        if len(trajectory.turns) >= self.cfg.max_turns:
            return {"over": f"agent.max_turns = {self.cfg.max_turns}"}
        if "chat" in answer:
            try:
                trajectory.next = trajectory.follow(answer["chat"], self.suffix)
            except AgentError as error:
                return {"refused": str(error)}
        elif why := self._heard(trajectory, answer["say"]):
            return {"over": why}
        assert trajectory.next is not None
        if len(trajectory.next.sequence) + len(trajectory.next.said) + turn_tokens > self.cfg.max_tokens:
            return {"over": f"agent.max_tokens = {self.cfg.max_tokens}"}
        return None

    def _heard(self, trajectory: Trajectory, words: list[Any]) -> str | None:
        """Adds the environment's words before the next turn; returns the reason if there is no next turn."""
        if not trajectory.turns:
            trajectory.next = TurnPosition(TokenSequence(self._first(trajectory.request.prompt, words)), (), words)
            return None
        if self._is_chat and trajectory.turns[-1].finish_reason == "length":
            return "the last turn was truncated (rollout.sampling.max_new_tokens)"
        sequence = trajectory.sequences[-1]
        if self.cfg.thoughts == "strip" and any(isinstance(m, dict) and m.get("role") == "user" for m in words):
            assert self._begins is not None
            begin, more = self._begins(trajectory.request.prompt)
            history = [*begin, *trajectory.messages, *words]
            trajectory.next = TurnPosition(TokenSequence(tuple(self.suffix.whole(history, more))), (), words)
        else:
            ids = self.suffix(words, sequence.ids[-1], self._told(trajectory.request.prompt))
            if ids is None:
                return "the last turn has no end token"
            trajectory.next = TurnPosition(sequence, ids, words)
        return None

    def _first(self, prompt: Prompt, words: list[Any]) -> tuple[int, ...]:
        """Returns the ids before the first turn. words: the environment's words after the prompt"""
        if not words:
            return prompt.token_ids
        if not self._is_chat:
            return (*prompt.token_ids, *(self.suffix(words, 0) or ()))
        assert self._begins is not None
        begin, more = self._begins(prompt)
        return tuple(self.suffix.whole([*begin, *self.suffix.messages(words)], more))

    def _tools(self, prompt: Prompt) -> list[Message]:
        """Returns the tools that the prompt's row declares, whether or not a chat template receives them."""
        tools: list[Message] = self._begins(prompt)[1].get("tools", []) if self._begins is not None else []
        return tools

    def _told(self, prompt: Prompt) -> Message:
        """Returns the row's variables of the chat template besides the messages."""
        return self._begins(prompt)[1] if self._is_chat and self._begins is not None else {}
