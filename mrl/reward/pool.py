"""Reward functions in worker processes: a hang or a crash of one call costs one sample and nothing else."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from mrl.reward.errors import NoVerdict, RewardError, SampleError
from mrl.reward.loading import Settings
from mrl.reward.plan import Component
from mrl.reward.score_requests import Outcome, ScoreRequest
from mrl.workers.pool import SessionFault, WorkerPool


class FunctionPool:
    """Calls the components' functions in `workers` processes.

    A call fails if it takes longer than `timeout_s`, raises, ends its process or returns no finite score. The
    constructor blocks until the functions are loaded, and raises RewardError if that fails.

    pictures: the user's functions get the prompts' images
    """

    def __init__(
        self,
        components: Sequence[Component],
        settings: Settings,
        answer_key: str,
        workers: int,
        timeout_s: float,
        pictures: bool = False,
    ) -> None:
        self.timeout_s = timeout_s
        what = f"reward function {', '.join(repr(component.spec) for component in components)}"
        setup = {"components": components, "settings": settings, "answer_key": answer_key, "pictures": pictures}
        self._workers = WorkerPool("reward-pool", "mrl.reward.worker", setup, workers, what=what, error=RewardError)
        self.close = self._workers.close

    def submit(
        self, component: Component, calls: Sequence[ScoreRequest], labels: Sequence[str]
    ) -> Future[list[Outcome | SampleError]]:
        """Starts one call of a component's function, from any thread: with one sample, or with a batch.

        labels: such as "sample 3 (row 103, prompt '31542=')". Raises RewardError if a row cannot be sent to a worker.
        """
        try:
            payload = pickle.dumps((component.name, [replace(call, sample=None) for call in calls]))
        except Exception as error:
            raise RewardError(f"{labels[0]}: its row cannot be sent to a reward worker: {error}") from error
        return self._workers.loop.submit(self._score(component, payload, labels))

    async def _score(self, component: Component, payload: bytes, labels: Sequence[str]) -> list[Outcome | SampleError]:
        def failed(reason: object, label: str, error: type[SampleError] = SampleError) -> SampleError:
            return error(f"reward function {component.spec!r} on {label} {reason}")

        n = len(labels)
        who = labels[0] if n == 1 else f"a batch of {n} samples, the first of them {labels[0]},"
        late = f"returned nothing within {self.timeout_s:g} s (reward.timeout_s)"
        try:
            async with self._workers.session() as session:
                answer = await session.exchange(payload, self.timeout_s, late)
        except SessionFault as fault:
            return [failed(fault, who)] * n
        if "error" in answer:
            kind = NoVerdict if answer["no_verdict"] else SampleError
            return [failed(f"raised:\n{answer['error']}", who, kind)] * n
        return [
            failed(f"returned no score: {result['error']}", label)
            if "error" in result
            else Outcome(result["score"], result["parts"])
            for label, result in zip(labels, answer["results"], strict=True)
        ]
