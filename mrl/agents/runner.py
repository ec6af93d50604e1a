"""Trajectories: turns of the model and words of an environment, as one token sequence that only grows.

Each trajectory is a coroutine of its own: it continues as soon as its turn is generated and its environment has
answered, whatever the others do. Its tokens do not depend on the others.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from mrl.agents import AgentError
from mrl.agents.chat import Message
from mrl.agents.suffix import Suffix
from mrl.agents.tool_call_parsers import WITH_SPECIAL_TOKENS
from mrl.agents.trajectory import TokenSequence, Trajectory, TurnPosition
from mrl.config.schema import AgentConfig
from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.data import Tokenizer, TokenizerError
from mrl.inference.seeds import sample_seed
from mrl.workers.pool import Session, SessionFault, WorkerPool

DAY_S = 86400.0
BYTES_PER_TOKEN = 16  # longer text is not tokenised: any language has 2 to 6, code that is mostly spaces up to 12
WORLD_STREAM = 1 << 46  # keeps the seeds of environments apart from samples'

Generate = Callable[[Request, SamplingParams], Coroutine[Any, Any, Sample]]
PromptMessages = Callable[[Prompt], tuple[list[Message], Message]]  # messages, template variables


class AgentRunner:
    """Plays trajectories with the program of `cfg`, in worker processes. Must be closed.

    stops: tokens that end a turn; is_chat: the prompts use a chat template; by_turn: samples have the rewards of each
    turn; begins: messages of a prompt under a chat template, for rewritten histories; turn_timeout_s: longest duration
    of one turn's generation
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
        self._is_chat, self._by_turn, self._begins = is_chat, by_turn, begins
        setup: Message = {"rollout": cfg.rollout, "parser": cfg.parser, "sandbox": cfg.sandbox.model_dump()}
        setup |= {"endpoint": cfg.endpoint, "answer_timeout_s": turn_timeout_s + cfg.step_timeout_s}
        setup["max_bytes"] = cfg.max_tokens * BYTES_PER_TOKEN
        self._stops, self._shows_special = stops, cfg.parser in WITH_SPECIAL_TOKENS
        what = f"agent.rollout {cfg.rollout!r}"
        self._pool = WorkerPool(
            "agents", "mrl.agents.worker", setup, cfg.workers, what=what, error=AgentError, is_shared=True
        )

    def close(self) -> None:
        self._pool.close()

    async def play(self, request: Request, params: SamplingParams, generate: Generate) -> Sample:
        """Plays one trajectory; a program that fails is started again with the same seeds, `retries` times.

        After the last retry the sample is `left_out`, or AgentError is raised, as `on_error` says. A fault counts only
        against the trajectory that caused it, not against others in the same process. Raises the errors of `generate`.
        """
        caller = asyncio.get_running_loop()

        async def there(request: Request, params: SamplingParams) -> Sample:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(generate(request, params), caller))

        return await asyncio.wrap_future(self._pool.loop.submit(self._play(request, params, there)))

    async def _play(self, request: Request, params: SamplingParams, generate: Generate) -> Sample:
        faults = 0
        while True:
            trajectory = Trajectory(request, time.monotonic() + (self.cfg.trajectory_timeout_s or math.inf))
            try:
                async with self._pool.session() as session:
                    return await self._turns(trajectory, session, params, generate)
            except SessionFault as fault:
                faults += fault.is_own
                if faults <= self.cfg.retries:
                    continue
                who = f"sample {request.sample_id} (data row {request.prompt.index})"
                what = f"agent.rollout {self.cfg.rollout!r} on {who} {fault}"
                why = f"{what} (attempts: {faults}; agent.retries)\n{fault.details}".rstrip()
            if self.cfg.on_error == "stop":
                raise AgentError(why)
            return Sample(request, np.zeros(0), np.zeros(0), "abort", "0", left_out=why)

    async def _turns(
        self, trajectory: Trajectory, session: Session, params: SamplingParams, generate: Generate
    ) -> Sample:
        late = f"did not finish within {self.cfg.trajectory_timeout_s or 0:g} s (agent.trajectory_timeout_s)"
        step_s = self.cfg.step_timeout_s
        silent = f"did not respond within {step_s:g} s (agent.step_timeout_s)"
        prompt, seed = trajectory.request.prompt, sample_seed(trajectory.request.seed, WORLD_STREAM, 0)
        tools = self._variables(prompt).get("tools", [])
        message: Message = {"start": {"row": prompt.row, "tools": tools, "prompt": prompt.text, "seed": seed}}
        while True:
            left_s = max(0.0, trajectory.ends_at - time.monotonic())
            data = json.dumps(message, default=str).encode()  # a row of a Parquet file may hold NaN
            answer = await session.exchange(data, min(step_s, left_s), late if left_s < step_s else silent)
            if "error" in answer:
                raise SessionFault(f"raised {answer['error']}", details=answer["traceback"])
            trajectory.settle(answer.get("arrived"))
            trajectory.reward(answer["reward"])
            if "done" in answer:
                if not trajectory.turns:
                    raise SessionFault(": ".join(filter(None, ("ended before the model's first turn", answer["over"]))))
                return trajectory.sample(answer["done"], self._by_turn)
            if time.monotonic() > trajectory.ends_at:
                raise SessionFault(late)
            try:
                no_turn = self._no_turn(trajectory, answer, params.max_new_tokens)
            except (AgentError, TokenizerError) as error:
                raise SessionFault(f"raised {error}") from error
            if no_turn is not None:
                message = no_turn
                continue
            turn = await generate(trajectory.next_request(), params)
            if time.monotonic() > trajectory.ends_at:
                raise SessionFault(late)
            text, shown, ids = self._tokenizer.decode_all([turn.response_ids])[0], None, turn.response_ids.tolist()
            if self._shows_special:  # for parsers that need special tokens, without the one that ended the turn
                ids = ids[:-1] if ids and ids[-1] in self._stops else ids
                shown = self._tokenizer.decode(ids, special=True)
            message = trajectory.offer(turn, text, shown) if self.cfg.endpoint else trajectory.take(turn, text, shown)

    def _no_turn(self, trajectory: Trajectory, answer: Message, turn_tokens: int) -> Message | None:
        """Sets the position of the next turn; returns the message for the program if there is none."""
        if "count" not in answer and len(trajectory.turns) >= self.cfg.max_turns:
            return {"over": f"agent.max_turns = {self.cfg.max_turns}"}
        if question := answer.get("chat", answer.get("count")):
            try:
                position = trajectory.follow(question, self.suffix)
            except AgentError as error:
                return {"refused": str(error)}
            if "count" in answer:
                return {"count": len(position.token_ids)}
            trajectory.next = position
        elif why := self._heard(trajectory, answer["say"]):
            return {"over": why}
        assert trajectory.next is not None
        if len(trajectory.next.token_ids) + turn_tokens > self.cfg.max_tokens:
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
            ids = self.suffix(words, sequence.ids[-1], self._variables(trajectory.request.prompt))
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

    def _variables(self, prompt: Prompt) -> Message:
        """Returns the row's variables of a chat template besides the messages, whether or not there is a template."""
        return self._begins(prompt)[1] if self._begins is not None else {}
