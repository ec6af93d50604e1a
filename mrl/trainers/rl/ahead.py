"""The next step's samples, drawn in a thread of rank 0 while the ranks learn from the last ones.

That thread never touches torch.distributed: messages of two threads on one group get mixed up. What needs the other
ranks waits until they meet.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from mrl.core import Rollout
from mrl.rollout import LacksWeights, RolloutError
from mrl.trainers.rl.sampler import Drawn, Work
from mrl.trainers.shared.heartbeat import Activity

CLOSE_S = 15.0  # until a thread whose requests have been cut off has ended


class Ahead:
    """Samples that are drawn ahead, at most one step's, and kept in checkpoints. Only rank 0's has any.

    note: takes one line for the user, in the main thread
    give_weights: brings an engine that was started again to the weights of the others, in the main thread
    interrupt: ends the requests that the thread waits for
    activity: of rank 0, which says whether the samples are still being drawn
    """

    def __init__(
        self,
        note: Callable[[str], None],
        give_weights: Callable[[str], None],
        interrupt: Callable[[], None],
        activity: Activity,
    ) -> None:
        self._note, self._give_weights, self._interrupt = note, give_weights, interrupt
        self._activity = activity
        self._thread: threading.Thread | None = None
        self._made: Future[Drawn] | None = None
        self._restored: Drawn | None = None
        self._lost: list[str] = []
        self._notes: list[str] = []

    def begin(self, work: Work) -> Work:
        """Has `work` done in a thread, or not at all where the checkpoint had its result; gives what waits for it."""
        made: Future[Drawn] = Future()
        self._made, restored, self._restored = made, self._restored, None
        if restored is not None:
            made.set_result(restored)
        else:
            self._thread = threading.Thread(target=_do, args=(work, made), name="sampling ahead", daemon=True)
            self._thread.start()
        return lambda: self._take(made)

    def _take(self, made: Future[Drawn]) -> Drawn:
        self._wait_for(made)
        drawn = made.result()
        if self._made is made:  # what has been taken is no longer ahead
            self._made = None
        return drawn

    def wait(self) -> list[str]:
        """Until the samples are there: the addresses of engines that were lost over them, and wait for weights. The
        samples are lost too, if there are any. Raises what the thread raised, RolloutError if nothing gets done for
        longer than any part of them takes."""
        assert self._made is not None
        self._wait_for(self._made)
        error, lost = self._made.exception(), self._lost
        notes, self._notes = self._notes, []
        for note in notes:
            self._note(note)
        self._lost = []
        if error is not None and not (lost and isinstance(error, RolloutError)):
            raise error
        return lost if error is not None else []

    def _wait_for(self, made: Future[Drawn]) -> None:
        began = time.monotonic()
        while not wait([made], max(0.0, self._activity.left_s(began))).done:
            if self._activity.left_s(began) <= 0:
                raise RolloutError(
                    "the samples of the next step are not there, and no response, score or engine has come for "
                    f"{self._activity.most_s:g} s, which is more than any of them may take"
                )

    def say(self, line: str) -> None:
        """Tells the user, once the main thread waits."""
        tell = self._note if threading.current_thread() is threading.main_thread() else self._notes.append
        tell(line)

    def give_weights(self, url: str) -> None:
        """To an engine that was started again or has come; raises LacksWeights in the thread."""
        if not self._is_here:
            return self._give_weights(url)
        self._lost.append(url)
        raise LacksWeights(f"engine {url} waits for its weights, which the trainer is changing")

    def close(self) -> None:
        """Ends what is being drawn."""
        if self._thread is not None and self._thread.is_alive():
            self._interrupt()
            self._thread.join(CLOSE_S)

    @property
    def _is_here(self) -> bool:
        return threading.current_thread() is self._thread

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The samples, which are there: tensors and plain values."""
        if self._made is None or not self._made.done():
            return {"ahead": None}
        drawn = self._made.result()
        rows = [json.dumps(row, default=str) for row in drawn.rows]
        return {"ahead": vars(drawn) | {"rollout": drawn.rollout.state_dict(), "rows": rows}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A checkpoint of a run that drew nothing ahead has none."""
        if (ahead := state.get("ahead")) is not None:
            rows = [json.loads(row) for row in ahead["rows"]]
            self._restored = replace(Drawn(**ahead), rollout=Rollout.from_state_dict(ahead["rollout"]), rows=rows)


def _do(work: Work, made: Future[Drawn]) -> None:
    began = time.monotonic()
    try:
        drawn = work()
        made.set_result(replace(drawn, metrics=drawn.metrics | {"perf/generate_s": time.monotonic() - began}))
    except BaseException as error:
        made.set_exception(error)
