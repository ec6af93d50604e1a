"""Reward manager: scores samples as `reward` says, each component separately, then as a weighted sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mrl.reward.errors import NoVerdict, RewardError, SampleError
from mrl.reward.plan import Component, make_plan
from mrl.reward.pool import FunctionPool
from mrl.reward.score_requests import Outcome, ScoreRequest
from mrl.reward.server import ServerClient

if TYPE_CHECKING:
    from mrl.config.schema import RewardConfig
    from mrl.core import Sample

PROMPT_HEAD_CHARS = 80
ScoreSamples = Callable[["Sequence[Sample]"], Sequence[float]]


@dataclass(frozen=True)
class _Call:
    """A component's score of one sample. weight: in the sample's score"""

    weight: float
    request: ScoreRequest
    label: str
    outcome: Future[Outcome] = field(default_factory=Future)


class RewardManager:
    """Scores samples while others are still generated: `submit` each when it is finished, then `collect` them all.

    `score` is the weighted sum of the components' scores. With several components, `score_parts` holds each one's score
    by its name and its further parts as "name/part"; with a single one, its parts. If a component fails on a sample,
    `on_error` "stop" makes `collect` raise RewardError; otherwise the sample's `reward_error` holds the reason and
    `failures` counts it. With "zero" it scores 0; with "leave_out" its score is NaN, and its `left_out` holds the
    reason. The keys are those of `data`; `overlong` uses `max_response_tokens`. The constructor blocks until all
    components are ready.
    """

    def __init__(
        self,
        cfg: RewardConfig,
        *,
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        data_source_key: str = "data_source",
        max_response_tokens: int = 0,
    ) -> None:
        self.cfg, self.plan = cfg, make_plan(cfg)
        self.prompt_key, self.data_source_key = prompt_key, data_source_key
        self.failures = 0
        self.on_scored: Callable[[object], None] = lambda future: None  # after each call, in any thread
        self.score_model: ScoreSamples | None = None  # runs `reward.model` on the ranks; set it before `collect`
        self._running: dict[Sample, dict[str, _Call]] = {}  # by component
        self._sources: dict[str, FunctionPool | ServerClient] = {}
        with ExitStack() as stack:
            if functions := self.plan.of_kind("function", "batch"):  # one pool for all
                settings = builtin_settings(cfg, max_response_tokens)
                pool = FunctionPool(functions, settings, answer_key, cfg.workers, cfg.timeout_s, cfg.pictures)
                stack.callback(pool.close)
                self._sources |= {component.name: pool for component in functions}
            for component in self.plan.of_kind("server"):
                client = ServerClient(component.spec, cfg.servers[component.spec])
                stack.callback(client.close)
                self._sources[component.name] = client
            self._open = stack.pop_all()

    def submit(self, sample: Sample) -> None:
        """Starts scoring `sample`, whose response_text must be set. Raises RewardError for a row that does not name its
        scorers, or cannot be sent to a worker."""
        request, label = self._request(sample)
        try:
            mix = self.plan.mix_of(sample.request.prompt.row, self.data_source_key)
        except RewardError as error:
            raise RewardError(f"{label}: its row {error}") from None
        running = {name: _Call(weight, request, label) for name, weight in mix.items()}
        for name, call in running.items():
            call.outcome.add_done_callback(self.on_scored)
            if (component := self.plan.components[name]).kind not in ("batch", "model"):
                self._start(component, [call])
        self._running[sample] = running

    def collect(self, samples: Sequence[Sample]) -> None:
        """Waits for `samples` and fills score, score_parts and reward_error; submits samples that are not submitted
        yet. A batch function and the reward model are called once, with these samples.

        Bounded: every call has its time-out. If `on_error` is "stop", raises RewardError at the first failure except
        NoVerdict; the other samples' results are then dropped. Raises the model's errors.
        """
        for sample in samples:
            if sample not in self._running:
                self.submit(sample)
        running = [self._running[sample] for sample in samples]
        try:
            for component in (*self.plan.of_kind("batch"), *self.plan.of_kind("model")):  # the model blocks
                if batch := [calls[component.name] for calls in running if component.name in calls]:
                    self._start(component, batch)
            if self.cfg.on_error == "stop":
                for future in as_completed(call.outcome for calls in running for call in calls.values()):
                    error = future.exception()
                    if error is not None and not isinstance(error, NoVerdict):
                        raise error
            for sample, calls in zip(samples, running, strict=True):
                self._fill(sample, calls)
        finally:
            for sample in samples:
                self._running.pop(sample, None)

    def _start(self, component: Component, calls: Sequence[_Call]) -> None:
        """Calls a component's scorer once."""
        requests, labels = [call.request for call in calls], [call.label for call in calls]
        if component.kind != "model":
            found = self._sources[component.name].submit(component, requests, labels)
            found.add_done_callback(lambda found: _settle(calls, found.exception() or found.result()))
            return
        if self.score_model is None:
            raise RewardError("the reward model is not loaded yet")
        scores = self.score_model([request.sample for request in requests if request.sample is not None])
        outcomes: list[Outcome | SampleError] = list(map(Outcome, scores))
        for i, (score, label) in enumerate(zip(scores, labels, strict=True)):
            if not math.isfinite(score):
                outcomes[i] = SampleError(f"reward model on {label}: the score must be finite, got {score}")
        _settle(calls, outcomes)

    def discard(self, samples: Sequence[Sample]) -> None:
        """Forgets the scores of samples that nobody will collect."""
        for sample in samples:
            self._running.pop(sample, None)

    def close(self) -> None:
        """Ends workers and connections; safe to call twice. A caller that waits in `collect` gets a RewardError."""
        self._open.close()

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _fill(self, sample: Sample, calls: Mapping[str, _Call]) -> None:
        sample.score, sample.score_parts, sample.reward_error = 0.0, {}, ""
        for name, call in calls.items():
            try:
                outcome = call.outcome.result()
            except SampleError as error:
                sample.reward_error = sample.reward_error or str(error)
                continue
            sample.score += call.weight * outcome.score
            if len(self.plan.components) > 1:
                parts = {f"{name}/{part}": value for part, value in outcome.parts.items()}
                sample.score_parts |= {name: outcome.score, **parts}
            else:
                sample.score_parts |= outcome.parts
        if self.cfg.truncated_score is not None and sample.finish_reason == "length":
            sample.score = self.cfg.truncated_score
        if sample.reward_error:
            sample.score = 0.0
            self.failures += 1
            if self.cfg.on_error != "zero":
                sample.score, sample.score_parts, sample.left_out = math.nan, {}, sample.reward_error

    def _request(self, sample: Sample) -> tuple[ScoreRequest, str]:
        request = sample.request
        row = request.prompt.row
        label = f"sample {request.sample_id} (row {request.prompt.index})"
        if self.prompt_key not in row:
            raise RewardError(f"{label}: the row has no {self.prompt_key!r} (data.prompt_key), only {sorted(row)}")
        prompt = prompt_text(row[self.prompt_key])
        label = f"sample {request.sample_id} (row {request.prompt.index}, prompt {prompt[:PROMPT_HEAD_CHARS]!r})"
        if sample.messages:
            row = {**row, "messages": sample.messages, "environment": sample.environment}
        pictures = request.prompt.pictures if self.cfg.pictures else None
        tokens = sample.num_generated_tokens
        return ScoreRequest(prompt, sample.response_text, row, tokens, sample, pictures=pictures), label


def _settle(calls: Sequence[_Call], found: BaseException | Sequence[Outcome | SampleError]) -> None:
    for call, outcome in zip(calls, [found] * len(calls) if isinstance(found, BaseException) else found, strict=True):
        if isinstance(outcome, Outcome):
            call.outcome.set_result(outcome)
        else:
            call.outcome.set_exception(outcome)


def longest_call_s(cfg: RewardConfig) -> float:
    """Returns the longest seconds of one call of a function, or a server with its retries, without queueing."""
    servers = [
        sum(server.timeout_s + server.backoff_s * 2**retry for retry in range(server.retries + 1))
        for server in cfg.servers.values()
    ]
    return max([cfg.timeout_s, *servers])


def builtin_settings(cfg: RewardConfig, max_response_tokens: int = 0) -> dict[str, dict[str, Any]]:
    """Returns settings of built-ins that have a section, as plain values: a worker imports no pydantic."""
    found = {"format": cfg.format.model_dump(), "code": cfg.code.model_dump()}
    if cfg.length is not None:
        found["length"] = cfg.length.model_dump()
    if cfg.overlong is not None:
        found["overlong"] = {**cfg.overlong.model_dump(), "max_tokens": max_response_tokens}
    return found


def prompt_text(prompt: object) -> str:
    """Returns a prompt as one string; for a list of chat messages the last one's content (the row holds them all)."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        return str(prompt[-1].get("content", ""))
    return str(prompt)
