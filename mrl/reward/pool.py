"""Reward functions in worker processes, so that a hang or a crash of one call costs one sample and nothing else."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from mrl.reward.errors import RewardError
from mrl.reward.process import STARTUP_TIMEOUT_S, Job, Worker

if TYPE_CHECKING:
    from mrl.config.schema import RewardConfig
    from mrl.core import Sample

MAX_JOBS_A_MESSAGE = 32
PROMPT_HEAD_CHARS = 80


class RewardPool:
    """Scores samples in `cfg.workers` processes, as they are submitted.

    A call gets (prompt text, response text, the data row). One that takes longer than `cfg.timeout_s`, raises, ends
    its process or returns no finite score fails; its worker is replaced where needed. `cfg.on_error` "stop": `collect`
    raises RewardError; "zero": the sample scores 0, its `reward_error` holds the reason, `failures` counts it.

    `prompt_key` and `answer_key` are the data's (`data.prompt_key`, `data.answer_key`). Samples may be submitted
    from any thread. The constructor returns when a worker has loaded the function; RewardError if that fails.
    """

    def __init__(self, cfg: RewardConfig, *, prompt_key: str = "prompt", answer_key: str = "answer") -> None:
        self.cfg = cfg
        self.prompt_key = prompt_key
        self.failures = 0
        self._jobs: dict[int, tuple[Sample, Job]] = {}  # by id(sample): samples are not hashable
        self._changed = threading.Condition()  # guards the fields below and the jobs' results
        self._queue: deque[Job] = deque()
        self._ready = False
        self._closed = False
        self._ended: RewardError | None = None  # set once: no new samples, whoever waits gets it
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        dispatcher = _Dispatcher(self, answer_key)
        # One thread starts and serves all workers: the kernel ends them with the thread that started them.
        self._thread = threading.Thread(target=dispatcher.run, name="reward-pool", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended, STARTUP_TIMEOUT_S + 10)
            error = self._ended
            if not self._ready and error is None:
                error = RewardError(f"no reward worker came up within {STARTUP_TIMEOUT_S:.0f} s")
        if error is not None:
            self.close()
            raise error

    def submit(self, sample: Sample) -> None:
        """Start scoring `sample` (its response_text must be set). RewardError if its row cannot be sent to a worker."""
        job = self._job(sample)
        with self._changed:
            if self._ended is not None:
                raise self._ended
            self._jobs[id(sample)] = (sample, job)
            self._queue.append(job)
            self._wake()

    def collect(self, samples: Sequence[Sample]) -> None:
        """Wait for `samples` and fill score and score_parts; those not submitted yet are submitted now.

        Bounded: every call has its time-out. Raises RewardError at the first failure where on_error is "stop"; the
        other samples' results are then dropped.
        """
        for sample in samples:
            if id(sample) not in self._jobs:
                self.submit(sample)
        jobs = [self._jobs[id(sample)][1] for sample in samples]
        stop = self.cfg.on_error == "stop"

        def settled() -> bool:
            return (
                self._ended is not None
                or all(job.done for job in jobs)
                or (stop and any(job.error is not None for job in jobs))
            )

        try:
            with self._changed:
                self._changed.wait_for(settled)
                failed = next((job for job in jobs if job.error is not None), None)
                if failed is not None and stop:
                    raise RewardError(failed.error)
                if self._ended is not None and not all(job.done for job in jobs):
                    raise self._ended
        finally:
            for sample in samples:
                self._jobs.pop(id(sample), None)
        for sample, job in zip(samples, jobs, strict=True):
            result = job.result or {"score": 0.0, "parts": {}}
            sample.score, sample.score_parts = result["score"], result["parts"]
            sample.reward_error = job.error or ""

    def close(self) -> None:
        """End all workers and the thread; safe to call twice. Whoever still waits in `collect` gets a RewardError."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._end(RewardError("the reward pool is closed"))
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _job(self, sample: Sample) -> Job:
        request = sample.request
        row = request.prompt.row
        label = f"sample {request.sample_id} (row {request.prompt.index})"
        if self.prompt_key not in row:
            raise RewardError(f"{label}: the row has no {self.prompt_key!r} (data.prompt_key), only {sorted(row)}")
        prompt = _text(row[self.prompt_key])
        label = f"sample {request.sample_id} (row {request.prompt.index}, prompt {prompt[:PROMPT_HEAD_CHARS]!r})"
        try:
            payload = pickle.dumps((prompt, sample.response_text, row))
        except Exception as error:
            raise RewardError(f"{label}: its row cannot be sent to a reward worker: {error}") from error
        return Job(label, payload)

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            return  # the pipe is full of wake-ups

    def _end(self, error: RewardError) -> None:
        with self._changed:
            self._ended = self._ended or error
            self._changed.notify_all()


def _text(prompt: object) -> str:
    """A prompt as one string; of a list of chat messages the last one's content (the row holds them all)."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        return str(prompt[-1].get("content", ""))
    return str(prompt)


class _Dispatcher:
    """The pool's thread: hands out jobs, takes answers, replaces workers that hang or die."""

    def __init__(self, pool: RewardPool, answer_key: str) -> None:
        self.pool = pool
        self.answer_key = answer_key
        self.workers: list[Worker] = []

    def run(self) -> None:
        pool = self.pool
        try:
            while pool._ended is None:
                while len(self.workers) < pool.cfg.workers:
                    self.workers.append(Worker.start(pool.cfg.function, self.answer_key))
                self._hand_out()
                self._wait()
                self._take_answers()
                self._check_deadlines()
        except RewardError as error:
            pool._end(error)
        except Exception as error:
            pool._end(RewardError(f"the reward pool failed: {type(error).__name__}: {error}"))
            raise
        finally:
            for worker in self.workers:
                worker.kill()

    def _hand_out(self) -> None:
        """Jobs for every idle worker: many at once while there are many, one by one towards the end."""
        pool = self.pool
        for worker in [worker for worker in self.workers if worker.ready and not worker.jobs]:
            with pool._changed:
                share = -(-len(pool._queue) // (4 * pool.cfg.workers))
                jobs = [pool._queue.popleft() for _ in range(min(share, MAX_JOBS_A_MESSAGE))]
            if jobs and not worker.give(jobs):
                self._retire(worker, jobs)

    def _wait(self) -> None:
        deadlines = [d for w in self.workers if (d := w.deadline(self.pool.cfg.timeout_s)) is not None]
        seconds = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        sources: list[int | Connection] = [self.pool._wake_read, *(w.connection for w in self.workers)]
        if self.pool._wake_read in wait(sources, seconds):
            os.read(self.pool._wake_read, 4096)

    def _take_answers(self) -> None:
        for worker in list(self.workers):
            messages, alive = worker.receive()
            for message in messages:
                self._take(worker, message)
            if messages:
                worker.since = time.monotonic()
            if not alive:
                self._died(worker)

    def _take(self, worker: Worker, message: dict[str, Any]) -> None:
        if "load_error" in message:
            raise RewardError(message["load_error"])
        if "ready" in message:
            worker.ready = True
            with self.pool._changed:
                self.pool._ready = True
                self.pool._changed.notify_all()
        elif "error" in message:
            self._fail(worker.jobs.popleft(), "raised:\n" + message["error"])
        else:
            job = worker.jobs.popleft()
            with self.pool._changed:
                job.result, job.done = message, True
                self.pool._changed.notify_all()

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for worker in list(self.workers):
            deadline = worker.deadline(self.pool.cfg.timeout_s)
            if deadline is None or now < deadline:
                continue
            if not worker.ready:
                raise RewardError(
                    f"reward function {self.pool.cfg.function!r}: a worker was not ready {STARTUP_TIMEOUT_S:.0f} s "
                    "after its start (importing the function's file takes too long or hangs)"
                )
            job = worker.jobs.popleft()
            self._retire(worker, list(worker.jobs))
            self._fail(job, f"gave no answer within {self.pool.cfg.timeout_s:g} s (reward.timeout_s)")

    def _died(self, worker: Worker) -> None:
        culprit, others = (worker.jobs[0], list(worker.jobs)[1:]) if worker.jobs else (None, [])
        how = self._retire(worker, others)
        if not worker.ready:
            raise RewardError(f"reward function {self.pool.cfg.function!r}: a worker died while loading it ({how})")
        if culprit is not None:
            self._fail(culprit, f"ended its process ({how})")

    def _retire(self, worker: Worker, jobs: list[Job]) -> str:
        """End a worker, give its jobs back, and say how it ended; `run` starts another."""
        self.workers.remove(worker)
        how = worker.kill()
        with self.pool._changed:
            self.pool._queue.extendleft(reversed(jobs))
        return how

    def _fail(self, job: Job, reason: str) -> None:
        pool = self.pool
        job.error = f"reward function {pool.cfg.function!r} on {job.label} {reason}"
        with pool._changed:
            pool.failures += 1
            job.done = True
            pool._changed.notify_all()
