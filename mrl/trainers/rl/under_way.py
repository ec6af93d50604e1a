"""Groups that are under way while the weights change: a thread of rank 0 has them drawn, steps take them in order.

A step that begins admits groups, so many that none is learnt more than `max_staleness` updates after it was admitted;
what has ended waits for its step. Nothing is dropped, and nobody overtakes: a group that takes long is waited for, so
that long responses are learnt like short ones. Groups are numbered over the run, and prompt and seeds follow from the
number. The thread asks engines and nobody else: engines that are lost, and ranks, are for the main thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mrl.core import Request, Sample
from mrl.rollout import RequestQueue, RolloutError, ServerLost
from mrl.trainers.rl.groups import Group
from mrl.trainers.rl.kept_samples import plain, restored
from mrl.trainers.shared.heartbeat import Activity

CLOSE_S = 15.0  # until a thread whose requests have been cut off has ended
OnSamples = Callable[[list[Sample]], None]


class UnderWay:
    """Groups of which a step learns from `wanted`, and those of the `ahead` steps after it are drawn meanwhile.

    groups: of the whole run; none after these is begun
    members: responses of a group
    request: of member m of group g
    draw: has what is fed to it drawn, until the end of that; in a thread. It gives samples as they finish
    replace: starts an engine again that `draw` has lost; the addresses of those that then lack their weights
    activity: of rank 0, which says whether what is waited for is still being drawn
    """

    def __init__(
        self,
        wanted: int,
        ahead: int,
        groups: int,
        members: int,
        request: Callable[[int, int], Request],
        draw: Callable[[RequestQueue, OnSamples], None],
        replace: Callable[[ServerLost], list[str]],
        activity: Activity,
    ) -> None:
        self._wanted, self._ahead, self._last, self._members = wanted, ahead, groups, members
        self._request, self._draw, self._replace, self._activity = request, draw, replace, activity
        self._changed = threading.Condition()  # guards what the thread writes: the next four
        self._parts: dict[int, dict[int, Sample]] = {}  # by group and member
        self._ended: dict[int, Group] = {}
        self._failure: BaseException | None = None
        self._is_drawing = False
        self._queue = RequestQueue()
        self._admitted = range(0)
        self._waited_s = 0.0

    # ---- the main thread

    def wait(self, step: int) -> list[str]:
        """Admits what may be begun in step `step` (from 0), and waits until its groups have ended: nothing then. Else
        the addresses of engines that were lost over it and lack their weights, to be called again once they have them.
        Raises what the thread raised, RolloutError if nothing gets done for longer than any part of them takes."""
        first = step * self._wanted
        last = min(first + (1 + self._ahead) * self._wanted, self._last)
        wanted, began = range(first, first + self._wanted), time.monotonic()
        while True:
            if lost := self.lost():
                return lost
            self._admit(range(first, last))
            self._wait_for(wanted)
            with self._changed:
                self._waited_s = time.monotonic() - began
                if all(n in self._ended for n in wanted):
                    return []

    def lost(self) -> list[str]:
        """Looks after what the thread has failed over, if it has; then as `wait`, without waiting."""
        with self._changed:
            failure, self._failure = self._failure, None
        if isinstance(failure, ServerLost):
            return self._replace(failure)
        if failure is not None:
            raise failure
        return []

    def take(self) -> tuple[list[Group], dict[str, float]]:
        """The groups of the step that was waited for, in order, and metrics."""
        with self._changed:
            found = [self._ended.pop(n) for n in self._admitted[: self._wanted]]
            self._admitted = self._admitted[self._wanted :]
            ready = len(self._ended)
        versions = [
            {*sample.token_weight_versions.tolist()}
            for group in found
            for sample in group
            if sample.token_weight_versions is not None
        ]
        mixed = {"staleness/mixed": sum(len(each) > 1 for each in versions) / len(versions)} if versions else {}
        return found, mixed | {
            "perf/wait_s": self._waited_s,
            "queue/groups": float(ready),
            "queue/running": float(len(self._admitted) - ready),
        }

    def rest(self) -> list[str]:
        """Until nothing is being drawn: all that is admitted has ended, or waits for the next `wait`. As `lost`."""
        self._wait_for(self._admitted)
        return self.lost()

    def _wait_for(self, groups: range) -> None:
        began = time.monotonic()
        with self._changed:
            while self._is_drawing and (missing := sum(n not in self._ended for n in groups)):
                if (left := self._activity.left_s(began)) <= 0:
                    raise RolloutError(
                        f"{missing} of {len(groups)} groups have not ended, and no response, score or engine has come "
                        f"for {self._activity.most_s:g} s, which is more than any of them may take"
                    )
                self._changed.wait(left)

    def close(self) -> None:
        """Ends the thread, once its requests have been cut off or have ended."""
        self._queue.end()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_drawing, CLOSE_S)

    def _admit(self, groups: range) -> None:
        """Has those of these drawn that are not yet, by a new thread if there is none."""
        with self._changed:
            new = [n for n in groups if n not in self._ended and (n not in self._admitted or not self._is_drawing)]
            self._admitted = groups
            if not new:
                return
            if not self._is_drawing:
                self._is_drawing, self._parts, self._queue = True, {}, RequestQueue()
                threading.Thread(target=self._run, args=(self._queue,), name="sampling under way", daemon=True).start()
        self._queue.put([self._request(number, member) for number in new for member in range(self._members)])

    # ---- the other thread

    def _run(self, queue: RequestQueue) -> None:
        failure: BaseException | None = None
        try:
            self._draw(queue, self._finished)
        except BaseException as error:
            failure = error
        with self._changed:
            self._failure, self._is_drawing = failure, False
            self._changed.notify_all()

    def _finished(self, samples: list[Sample]) -> None:
        with self._changed:
            for sample in samples:
                number, member = divmod(sample.request.sample_id, self._members)
                parts = self._parts.setdefault(number, {})
                parts[member] = sample
                if len(parts) == self._members:
                    self._ended[number] = [parts[m] for m in range(self._members)]
                    del self._parts[number]
            self._changed.notify_all()

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The groups that have ended and are not learnt yet, not scored; the others are begun anew. Tensors and plain
        values."""
        with self._changed:
            ended = sorted(self._ended.items())
        return {"under_way": [{"number": n, "samples": [plain(sample) for sample in group]} for n, group in ended]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A checkpoint of a run that had nothing under way has none."""
        for group in state.get("under_way") or []:
            number = group["number"]
            requests = [self._request(number, member) for member in range(self._members)]
            self._ended[number] = [restored(r, s) for r, s in zip(requests, group["samples"], strict=True)]
