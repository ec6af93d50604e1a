"""Engine processes on this machine: start, readiness, log and exit."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mrl.files import lock
from mrl.inference import fork_server
from mrl.inference.access import OPEN, Access, listeners
from mrl.inference.client import EngineClient
from mrl.inference.errors import EngineStartError, PortTaken
from mrl.inference.launch import Launch
from mrl.ports import HERE

FORMER_ENGINE_S = 30.0  # its supervisor needs GRACE_S and a little more to end it
GRACE_S = 3.0  # between SIGTERM and SIGKILL: an engine has nothing to save
POLL_S = 0.1
ANSWER_S = 5.0
LOG_TAIL_LINES = 40
LAST_WORDS_LINES = 5  # at least, of an engine that wrote less than that since it was ready
SUPERVISOR = Path(__file__).with_name("supervisor.py")


class Started:
    """An engine that the run has started, on this node or another; see `EngineProcess`."""

    name: str
    url: str
    log: Path

    @property
    def is_gone(self) -> bool:
        """True once its node is gone, so that it cannot be restarted."""
        return False

    @property
    def here(self) -> list[EngineProcess]:
        """The engine's processes on this node, which end with this process."""
        return []

    def exit_code(self) -> int | None:
        """Returns None while the engine runs, as far as is known here; 128 + n if signal n ended it."""
        raise NotImplementedError

    def exit_report(self) -> str:
        """Returns one paragraph for an error message: why the engine ended, and the end of its log."""
        raise NotImplementedError

    def is_ready(self, timeout_s: float) -> bool:
        """Returns True if the HTTP server responds. Raises EngineStartError, and ends the process, if it has ended, is
        not ready within `timeout_s` of its start, or if another process has its port."""
        raise NotImplementedError

    def restart(self) -> None:
        """Ends the engine's processes and starts it again at the same address; returns at once."""
        raise NotImplementedError

    def wait_ready(self, timeout_s: float) -> None:
        """Blocks until the engine responds; raises as `is_ready`."""
        while not self.is_ready(timeout_s):
            time.sleep(POLL_S)


class EngineProcess(Started):
    """One engine server on this machine, in its own process group. The constructor starts it and returns at once.

    Its whole process tree ends with `close`, with the normal exit of this process, and within a second after a signal
    kills this process (see supervisor.py). It is forked from a fork server if there is one.

    launch: called at every start with a new private folder for the engine's temporary files, removed at its end
    host: address of this machine on which it listens
    """

    def __init__(
        self,
        name: str,
        launch: Callable[[Path], Launch],
        port: int,
        log: Path,
        access: Access = OPEN,
        host: str = HERE,
    ) -> None:
        self.name = name
        self.url = f"http://{host}:{port}"
        self.log = log
        self._launch, self._port, self._access, self._host = launch, port, access, host
        self._start()

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            # all processes of the engine inherit the handle: the lock is free once every process of an earlier engine,
            # also of this run, has ended
            if not lock(out, timeout_s=FORMER_ENGINE_S):
                text = f"an engine that was started before still runs after {FORMER_ENGINE_S:g} s ({self.log})"
                raise EngineStartError(f"{self.name} did not start: {text}; end it first")
            self._folder = Path(tempfile.mkdtemp(prefix="mrl-engine-"))
            try:
                self._process = self._supervised(self._launch(self._folder), out.fileno())
            except BaseException:
                shutil.rmtree(self._folder)
                raise
        self._started = time.monotonic()
        self._lines_when_ready: int | None = None
        atexit.register(self.close)

    def _supervised(self, launch: Launch, out: int) -> subprocess.Popen[bytes] | fork_server.SupervisorProcess:
        env = launch.env | {"TMPDIR": str(self._folder)}
        made = fork_server.start(launch.kind, launch.command, env, GRACE_S, self._folder, out)
        if made is not None:
            return made
        own = [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), str(GRACE_S), str(self._folder)]
        return subprocess.Popen(
            [*own, *launch.command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def restart(self) -> None:
        self.close()
        self._start()

    @property
    def pid(self) -> int:
        """Process id of the supervisor, the root of the engine's process tree."""
        return self._process.pid

    @property
    def here(self) -> list[EngineProcess]:
        return [self]

    def exit_code(self) -> int | None:
        return self._process.poll()

    def _log_lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def exit_report(self) -> str:
        code, lines, count = self.exit_code(), self._log_lines(), LOG_TAIL_LINES
        state = "is running" if code is None else f"ended with {describe_exit(code)}"
        if self._lines_when_ready is not None:  # lines from before it was ready only count if it never was
            count = min(count, max(LAST_WORDS_LINES, len(lines) - self._lines_when_ready))
        tail = "\n".join(line[:400] for line in lines[-count:])
        return f"{self.name} ({self.url}) {state}. End of {self.log}:\n{tail}"

    def is_ready(self, timeout_s: float) -> bool:
        if self.exit_code() is not None:
            raise EngineStartError(f"engine did not start: {self.exit_report()}")
        if self._listens() and self._answers():
            self._lines_when_ready = len(self._log_lines())
            return True
        if time.monotonic() - self._started > timeout_s:
            self.close()
            raise EngineStartError(
                f"engine not ready within rollout.startup_timeout_s = {timeout_s:g} s: {self.exit_report()}"
            )
        return False

    def _listens(self) -> bool:
        """Returns True if the engine itself holds the port, so that the run's key may be sent there."""
        found = listeners(self._port, self._host)
        strangers = [one for one in found if not one.is_held_by(self.pid)]
        # none, or an engine that has just ended
        if not strangers or strangers[0] not in listeners(self._port, self._host):
            return bool(found) and not strangers
        self.close()
        raise PortTaken(
            f"{self.name} ({self.url}) did not start: a process of user {strangers[0].user} that mrl did not start "
            "listens there. Nothing was sent to it; end it, or start the run again to get another port"
        )

    def _answers(self) -> bool:
        with contextlib.closing(EngineClient(self.url, ANSWER_S, self._access)) as client:
            return client.is_up()

    def close(self) -> None:
        """Ends the engine and all processes that it started. Safe to call twice and from an exit handler."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(GRACE_S + 10.0)
            except subprocess.TimeoutExpired:
                self._process.kill()  # the engine's main process dies with its supervisor
                self._process.wait(10.0)
        shutil.rmtree(self._folder, ignore_errors=True)  # where the supervisor was killed


class EnginePart(EngineProcess):
    """Part of an engine over several nodes that answers no requests; the first part answers them."""

    def is_ready(self, timeout_s: float) -> bool:
        if self.exit_code() is not None:
            raise EngineStartError(f"engine did not start: {self.exit_report()}")
        return True


def describe_exit(code: int) -> str:
    """Returns text for an exit code, with the name of the signal if one ended the process."""
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"exit code {code} ({signal.Signals(code - 128).name})"
    return f"exit code {code}"
