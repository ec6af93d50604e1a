"""Adapters of other environments to classes for `agent.rollout`: Gymnasium's, and OpenEnv's over WebSocket and HTTP.
WebSocket needs the package websockets.

    from mrl.agents.environments import from_gymnasium

    Lake = from_gymnasium(lambda row: gymnasium.make("FrozenLake-v1"), act=lambda turn: "<v>^".index(turn.text))
"""

from __future__ import annotations

import http.client
import random
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

from mrl import strict_json
from mrl.agents.context import Observation, Turn
from mrl.packages import pip_install_extra

Act = Callable[[Turn], Any]
Show = Callable[[Any], Observation]
Step = tuple[Observation, float | None, bool]
HTTP_S = 600.0  # of one request; agent.step_timeout_s ends what takes longer
MAX_ANSWER_BYTES = 64 << 20


class OpenEnvError(RuntimeError):
    """The server does not follow OpenEnv's protocol."""


def from_gymnasium(
    make: Callable[[dict[str, Any]], Any], act: Act, show: Show = str, options: str | None = None
) -> type[Any]:
    """Returns a class for `agent.rollout`.

    Args:
        make: makes the `gymnasium.Env` of a row of the data.
        act: maps a turn to an action; may raise ValueError, whose text goes to the model.
        show: maps an observation to text for the model, or to messages with a chat template.
        options: the row's key of the options for `reset`.
    """
    return _environment(make, act, show, options, float)


def _environment(
    make: Callable[[dict[str, Any]], Any],
    act: Act,
    show: Show,
    options: str | None,
    number: Callable[[Any], float | None],
) -> type[Any]:
    """number: converts a reward of the environment."""

    class Environment:
        def reset(self, row: dict[str, Any], rng: random.Random) -> Observation:
            self.inner = make(row)
            given = row.get(options) if options is not None else None
            observation, _ = self.inner.reset(seed=rng.getrandbits(31), options=given)
            self.shown = show(observation)
            return self.shown

        def step(self, turn: Turn) -> Step:
            try:
                action = act(turn)
            except ValueError as error:  # for the model, in the form of an observation
                told, like = str(error), self.shown
                return told if isinstance(like, str) else [{**like[-1], "content": told}], None, False
            observation, reward, terminated, truncated, _ = self.inner.step(action)
            self.shown = show(observation)
            return self.shown, number(reward), bool(terminated or truncated)

        def close(self) -> None:
            if hasattr(self, "inner"):
                self.inner.close()

    return Environment


def from_openenv(url: str | Callable[[dict[str, Any]], str], act: Act, show: Show = strict_json.dumps) -> type[Any]:
    """Returns a class for `agent.rollout` that uses an OpenEnv server.

    url: of the server, or a function of the row. At ws://host:port each trajectory has a session of its own (/ws), with
    as many at once as the server allows. At http://host:port it uses POST /reset and /step, and GET /state, of a server
    with a single episode, which serves one trajectory at a time; its state reveals a second one, and a server that
    makes a new environment for each request. act: returns the action's fields; otherwise as in `from_gymnasium`

    A reward of null means no reward, as in OpenEnv; a trajectory without any reward has no score.
    """

    def make(row: dict[str, Any]) -> _OpenEnv | _OpenEnvSession:
        own = url if isinstance(url, str) else url(row)
        return _OpenEnvSession(own) if urlsplit(own).scheme in ("ws", "wss") else _OpenEnv(own)

    return _environment(make, act, show, None, lambda reward: None if reward is None else float(reward))


class _OpenEnv:
    """An OpenEnv server over HTTP in the form of a `gymnasium.Env`. Its methods block: they run in the trajectory's
    thread.
    """

    def __init__(self, url: str) -> None:
        self.url, self.steps = url, 0

    def reset(self, *, seed: int, options: None) -> tuple[Any, dict[str, Any]]:
        asked = _episode(seed)
        told = _asked(self.url, "POST", "/reset", {"seed": seed, "episode_id": asked})
        self.episode = _asked(self.url, "GET", "/state", None).get("episode_id", asked)
        return _observation(self.url, told), {}

    def step(self, action: Any) -> tuple[Any, float | None, bool, bool, dict[str, Any]]:
        told = _asked(self.url, "POST", "/step", {"action": action, "episode_id": self.episode})
        self.steps += 1
        state, mine = _asked(self.url, "GET", "/state", None), (self.episode, self.steps)
        if (found := (state.get("episode_id", mine[0]), state.get("step_count", mine[1]))) != mine:
            raise OpenEnvError(
                f"{self.url} is at step {found[1]} of episode {found[0]!r}, and this trajectory at step {mine[1]} of "
                f"{mine[0]!r}: a server runs one episode at a time, so give each trajectory its own (url in the row); "
                "if it makes an environment for each request, as current servers of OpenEnv do, use ws://, not http://"
            )
        return _step(self.url, told)

    def close(self) -> None:
        """Nothing is kept open."""


class _OpenEnvSession:
    """A session of its own at an OpenEnv server, in the form of a `gymnasium.Env`, as `_OpenEnv`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._session: Any = None  # a websockets.sync.client.ClientConnection

    def reset(self, *, seed: int, options: None) -> tuple[Any, dict[str, Any]]:
        told = self._asked("reset", {"seed": seed, "episode_id": _episode(seed)})
        return _observation(self.url, told), {}

    def step(self, action: Any) -> tuple[Any, float | None, bool, bool, dict[str, Any]]:
        return _step(self.url, self._asked("step", action))

    def close(self) -> None:
        if self._session is not None:
            from websockets.exceptions import ConnectionClosed

            with closing(self._session), suppress(ConnectionClosed):
                self._session.send(strict_json.dumps({"type": "close"}))

    def _asked(self, kind: str, data: Any) -> dict[str, Any]:
        try:
            from websockets.exceptions import ConnectionClosed, WebSocketException
            from websockets.sync.client import connect
        except ImportError as error:
            install = pip_install_extra("openenv")
            raise OpenEnvError(f"{self.url} needs the package websockets ({error}): {install}") from None
        try:
            if self._session is None:
                address = self.url.rstrip("/") + "/ws"
                self._session = connect(address, open_timeout=HTTP_S, max_size=MAX_ANSWER_BYTES, proxy=None)
            with suppress(ConnectionClosed):  # a server that is full has said so, and closed
                self._session.send(strict_json.dumps({"type": kind, "data": data}))
            told = strict_json.loads(self._session.recv(HTTP_S))
        except (OSError, WebSocketException) as error:
            raise OpenEnvError(f"{kind} at {self.url}: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise OpenEnvError(f"{kind} at {self.url} did not return JSON: {error}") from error
        found = told.get("data") if isinstance(told, dict) else None
        if not isinstance(found, dict) or told.get("type") not in ("observation", "error"):
            raise OpenEnvError(f"{kind} at {self.url} returned {str(told)[:200]!r}, expected an observation")
        if told["type"] == "error":
            advice = ""
            if found.get("code") == "CAPACITY_REACHED":
                advice = "; start it with a max_concurrent_envs of at least the trajectories that are in flight"
            why = str(found.get("message")).rstrip(".")
            raise OpenEnvError(f"{kind} at {self.url} failed ({found.get('code')}): {why}{advice}")
        return found


def _episode(seed: int) -> str:
    return str(uuid.UUID(int=random.Random(seed).getrandbits(128)))


def _observation(url: str, told: dict[str, Any]) -> Any:
    if "observation" not in told:
        raise OpenEnvError(f"the response of {url} lacks 'observation': {str(told)[:200]}")
    return told["observation"]


def _step(url: str, told: dict[str, Any]) -> tuple[Any, float | None, bool, bool, dict[str, Any]]:
    reward, done = told.get("reward"), told.get("done", False)  # OpenEnv's defaults
    if not isinstance(reward, int | float | None):
        raise OpenEnvError(f"{url} returned the reward {reward!r}: it must be a number or null")
    if not isinstance(done, bool):
        raise OpenEnvError(f"{url} returned {done!r} as 'done': it must be true or false")
    return _observation(url, told), reward, done, False, {}


def _asked(url: str, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    parts, what = urlsplit(url), f"{method} {url}{path}"
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if parts.scheme not in kinds or parts.hostname is None:
        raise OpenEnvError(f"{url!r} is not a server address such as ws://host:port")
    data = None if body is None else strict_json.dumps(body)
    connection = kinds[parts.scheme](parts.hostname, parts.port, timeout=HTTP_S)
    try:
        with closing(connection):
            connection.request(method, parts.path.rstrip("/") + path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read(MAX_ANSWER_BYTES)
        told = strict_json.loads(content) if answer.status == 200 else None
    except (OSError, http.client.HTTPException) as error:
        raise OpenEnvError(f"{what}: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise OpenEnvError(f"{what} did not return JSON: {error}") from error
    if not isinstance(told, dict):
        shown = content[:200].decode(errors="replace")
        raise OpenEnvError(f"{what} returned {answer.status} and {shown!r}, expected 200 and a JSON object")
    return told
