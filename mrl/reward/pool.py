"""Worker pool of reward functions: a hang or a crash of one call costs one sample and nothing else."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from mrl.reward.errors import NoVerdict, RewardError, SampleError
from mrl.reward.loading import Settings
from mrl.reward.plan import Component
from mrl.reward.process import Job, Worker
from mrl.reward.score_requests import Outcome, PendingScores, ScoreRequest, set_outcome
from mrl.worker_process import STARTUP_TIMEOUT_S

MAX_JOBS_A_MESSAGE = 32


@dataclass(frozen=True)
class PoolSetup:
    """Setup and limits of every worker. pictures: the user's functions get the prompts' images."""

    components: tuple[Component, ...]
    settings: Settings
    answer_key: str
    workers: int
    timeout_s: float
    pictures: bool = False

    def for_worker(self) -> dict[str, Any]:
        names = "components", "settings", "answer_key", "pictures"
        return {name: vars(self)[name] for name in names}

    def __str__(self) -> str:
        return ", ".join(repr(component.spec) for component in self.components)


class FunctionPool:
    """Calls the components' functions in `setup.workers` processes, as samples are submitted, from any thread.

    A call fails if it takes longer than `timeout_s`, raises, ends its process or returns no finite score: its future
    raises SampleError, and its worker is replaced where needed. The constructor blocks until a worker has loaded the
    functions, and raises RewardError if that fails.
    """

    def __init__(self, setup: PoolSetup) -> None:
        self.setup = setup
        self._lock = threading.Lock()  # guards the fields below
        self._queue: deque[Job] = deque()
        self._batches: dict[str, list[tuple[ScoreRequest, str, Future[Outcome]]]] = {}  # by component, until `flush`
        self._pending = PendingScores()
        self.ready: Future[None] = Future()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        # One thread starts and serves all workers: the kernel ends them with the thread that started them.
        self._thread = threading.Thread(target=_Dispatcher(self).run, name="reward-pool", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self.ready.result(STARTUP_TIMEOUT_S + 10)
        except TimeoutError:
            self.close()
            raise RewardError(f"no reward worker started within {STARTUP_TIMEOUT_S:.0f} s") from None
        except RewardError:
            self.close()
            raise

    def submit(self, component: Component, call: ScoreRequest, label: str) -> Future[Outcome]:
        """Starts scoring; queues batches and images until `flush`. Raises RewardError if the row cannot be sent to a
        worker.
        """
        future = self._pending.new()
        if component.kind in ("batch", "images"):
            with self._lock:
                self._batches.setdefault(component.name, []).append((call, label, future))
        else:
            self._queue_job(component, [call], [label], [future])
        return future

    def flush(self, component: Component, futures: Collection[Future[Outcome]]) -> None:
        """Calls the batch function once with the samples of these futures. Samples of other futures, such as those of
        later steps, stay queued.
        """
        mine = set(map(id, futures))
        with self._lock:
            every = self._batches.pop(component.name, [])
            self._batches[component.name] = [each for each in every if id(each[2]) not in mine]
        if waiting := [each for each in every if id(each[2]) in mine]:
            calls, labels, futures = map(list, zip(*waiting, strict=True))
            self._queue_job(component, calls, labels, futures)

    def close(self) -> None:
        """Ends all workers and the thread; safe to call twice. Unanswered futures raise RewardError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.end(RewardError("the reward pool is closed"))
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def end(self, error: RewardError) -> None:
        self._pending.end(error)
        if not self.ready.done():
            self.ready.set_exception(error)

    @property
    def has_ended(self) -> bool:
        return self._pending.ended is not None

    def take_jobs(self) -> list[Job]:
        """Returns queued jobs: many at once from a long queue, one by one towards the end."""
        with self._lock:
            share = -(-len(self._queue) // (4 * self.setup.workers))
            return [self._queue.popleft() for _ in range(min(share, MAX_JOBS_A_MESSAGE))]

    def give_back(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            self._queue.extendleft(reversed(jobs))

    def wait(self, connections: Sequence[Connection], seconds: float | None) -> None:
        """Blocks until a connection has data, a job has been submitted, or `seconds` have passed."""
        sources: list[int | Connection] = [self._wake_read, *connections]
        if self._wake_read in wait(sources, seconds):
            os.read(self._wake_read, 4096)

    def _queue_job(
        self, component: Component, calls: list[ScoreRequest], labels: list[str], futures: list[Future[Outcome]]
    ) -> None:
        try:
            payload = pickle.dumps((component.name, [replace(call, sample=None) for call in calls]))
        except Exception as error:
            raise RewardError(f"{labels[0]}: its row cannot be sent to a reward worker: {error}") from error
        with self._lock:
            self._queue.append(Job(component, labels, payload, futures))
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            return  # the pipe is full of wake-ups


class _Dispatcher:
    """The pool's thread: dispatches jobs, receives answers, replaces workers that hang or die."""

    def __init__(self, pool: FunctionPool) -> None:
        self.pool = pool
        self.setup = pool.setup
        self.workers: list[Worker] = []

    def run(self) -> None:
        pool = self.pool
        try:
            while not pool.has_ended:
                while len(self.workers) < self.setup.workers:
                    self.workers.append(Worker(self.setup.for_worker()))
                self._hand_out()
                self._wait()
                self._take_answers()
                self._check_deadlines()
        except RewardError as error:
            pool.end(error)
        except Exception as error:
            pool.end(RewardError(f"the reward pool failed: {type(error).__name__}: {error}"))
            raise
        finally:
            for worker in self.workers:
                worker.kill()

    def _hand_out(self) -> None:
        for worker in [worker for worker in self.workers if worker.ready and not worker.jobs]:
            jobs = self.pool.take_jobs()
            if jobs and not worker.send_jobs(jobs):
                self._retire(worker, jobs)

    def _wait(self) -> None:
        deadlines = [d for w in self.workers if (d := w.deadline(self.setup.timeout_s)) is not None]
        seconds = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        self.pool.wait([worker.connection for worker in self.workers], seconds)

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
            if not self.pool.ready.done():
                self.pool.ready.set_result(None)
            return
        job = worker.jobs.popleft()
        if "error" in message:
            job.fail("raised:\n" + message["error"], error=NoVerdict if message["no_verdict"] else SampleError)
            return
        for place, result in enumerate(message["results"]):
            if "error" in result:
                job.fail("returned no score: " + result["error"], place)
            else:
                set_outcome(job.futures[place], Outcome(result["score"], result["parts"]))

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for worker in list(self.workers):
            deadline = worker.deadline(self.setup.timeout_s)
            if deadline is None or now < deadline:
                continue
            if not worker.ready:
                raise RewardError(
                    f"reward function {self.setup}: a worker was not ready {STARTUP_TIMEOUT_S:.0f} s after its start: "
                    "the import of the function's file takes too long or hangs"
                )
            job = worker.jobs.popleft()
            self._retire(worker, list(worker.jobs))
            job.fail(f"returned nothing within {self.setup.timeout_s:g} s (reward.timeout_s)")

    def _died(self, worker: Worker) -> None:
        culprit, others = (worker.jobs[0], list(worker.jobs)[1:]) if worker.jobs else (None, [])
        how = self._retire(worker, others)
        if not worker.ready:
            raise RewardError(f"reward function {self.setup}: a worker died while loading it ({how})")
        if culprit is not None:
            culprit.fail(f"ended its process ({how})")

    def _retire(self, worker: Worker, jobs: list[Job]) -> str:
        """Ends a worker, returns its jobs to the queue, and says how it ended; `run` starts another."""
        self.workers.remove(worker)
        how = worker.kill()
        self.pool.give_back(jobs)
        return how
