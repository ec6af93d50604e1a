"""Starting lost engines again: how often in a run, who is told, and who gives them their weights."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mrl.rollout.errors import RolloutError
from mrl.rollout.process import Started, describe_exit

log = logging.getLogger(__name__)


class Restarts:
    """None are allowed before `allow`: an engine that nobody gives its weights would sample from the wrong ones.

    made: restarts so far; post: has a function called in the main thread
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.made = limit, 0
        self.post: Callable[[Callable[[], object]], object] = lambda work: work()
        self._note: Callable[[str], None] | None = None
        self._give_weights: Callable[[str], None] | None = None

    def allow(self, note: Callable[[str], None], give_weights: Callable[[str], None]) -> None:
        """note: takes one line for the user. give_weights: brings the engine at a URL, which has just been started and
        sampled nothing, to the weights and the version that the others have."""
        self._note, self._give_weights = note, give_weights

    def say(self, line: str) -> None:
        """Tells the user; writes to the log as long as nobody listens."""
        tell = self._note or log.warning
        self.post(lambda: tell(line))

    def is_left(self) -> bool:
        """Whether one more is allowed."""
        return self._give_weights is not None and self.made < self.limit

    def take(self, process: Started, error: Exception) -> None:
        """Counts one and tells the user. Raises `error`, what the engine was lost by, if none is left."""
        if not self.is_left():
            if self.made == 0:
                raise error
            used_up = f"rollout.max_restarts = {self.limit} restarts are used up"
            raise RolloutError(f"{error}\n{used_up}") from error
        self.made += 1
        code = process.exit_code()
        why = "does not answer" if code is None else f"ended with {describe_exit(code)}"
        self.say(f"{process.name} {why}: starting it again (restart {self.made} of {self.limit}; {process.log})")

    def give_weights(self, url: str) -> None:
        """Brings a server that was started again to the weights of the others, as `allow` was told."""
        assert self._give_weights is not None, "a restart was taken"
        self._give_weights(url)
