"""The engine's HTTP interface, one typed method an endpoint. No other module knows a URL path of the engine.

The protocol is SGLang's native one; mrl's own transformers engine speaks the same subset. Token ids travel in both
directions, text never does. Every call has a time-out, and every failure is an `EngineError` that says which engine,
which endpoint and what the engine answered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import httpx

from mrl.rollout.answers import (
    MOST_TEXT,
    BadAnswer,
    ModelInfo,
    RankChecksums,
    error_message,
    from_json,
    read_checksums,
    read_model_info,
    typed,
)
from mrl.rollout.listener import listeners

CONNECT_TIMEOUT_S = 10.0
DENIED = (401, 403)
T = TypeVar("T")
PauseMode = Literal["in_place", "retract", "abort"]
LoadFormat = Literal["flattened_bucket"]


class EngineError(RuntimeError):
    """An engine did not do what it was asked. `status` is None when there was no HTTP answer at all."""

    def __init__(self, url: str, endpoint: str, status: int | None, text: str) -> None:
        self.url = url
        self.endpoint = endpoint
        self.status = status
        self.text = text
        answer = "no answer" if status is None else f"HTTP {status}"
        super().__init__(f"engine {url}: /{endpoint}: {answer}: {text}")

    def __reduce__(self) -> tuple[type[EngineError], tuple[str, str, int | None, str]]:
        return type(self), (self.url, self.endpoint, self.status, self.text)


@dataclass(frozen=True)
class Access:
    """What opens the engines of a run, the same for all of them.

    api_key: sent with every request; None: they want none
    ours: mrl started them on this machine, so that what listens there without being this account's is a stranger
    """

    api_key: str | None = dataclasses.field(default=None, repr=False)
    ours: bool = False

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def check(self, url: str, endpoint: str) -> None:
        """Before anything is sent: raises EngineError if a stranger has taken the engine's port."""
        if not self.ours:
            return
        for listener in listeners(urlsplit(url).port or 0):
            if listener.user != os.geteuid():
                text = f"not asked: a process of user {listener.user} listens there, it is no engine of this run"
                raise EngineError(url, endpoint, None, text)


OPEN = Access()


class EngineClient:
    """One engine. Thread-safe; connections are kept alive.

    timeout_s: longest wait for one answer; a method's own `timeout_s` overrides it. Every method raises EngineError
    on a time-out, a refused or broken connection, a status other than 200 or an answer of `success: false`.
    """

    def __init__(self, url: str, timeout_s: float = 300.0, access: Access = OPEN) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._access = access
        # trust_env=False: a proxy set for the internet must not see engine traffic
        self._http = httpx.Client(
            base_url=self.url,
            timeout=self._timeout(timeout_s),
            headers=access.headers,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    # ---- generation

    def generate(self, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        """The raw /generate answer: a dict, or a list of dicts when `body["input_ids"]` is a list of lists."""
        return self._call("POST", "generate", body, timeout_s)

    def abort_all(self) -> None:
        self._call("POST", "abort_request", {"rid": "", "abort_all": True})

    def pause_generation(self, mode: PauseMode) -> None:
        self._call("POST", "pause_generation", {"mode": mode})

    def continue_generation(self) -> None:
        self._call("POST", "continue_generation", {})

    def flush_cache(self, wait_idle_s: float = 0.0) -> None:
        """Forget every cached prefix. Refused while requests run; `wait_idle_s` waits for them first."""
        self._call("POST", f"flush_cache?timeout={wait_idle_s}", None, self.timeout_s + wait_idle_s)

    # ---- state

    def model_info(self) -> ModelInfo:
        return self._call("GET", "model_info", read=read_model_info)

    def server_info(self) -> dict[str, Any]:
        """The engine's resolved settings, as it reports them."""
        return self._call("GET", "server_info", read=lambda info: typed(info, "the answer", dict))

    def is_let_in(self, host: str) -> bool:
        """False if the engine refuses one who has not its key, if there is one, and asks under this host name."""
        try:
            self._call("GET", "model_info", headers={"Host": host})
        except EngineError as error:
            if error.status in (*DENIED, 400):
                return False
            raise
        return True

    # ---- weights

    def begin_weight_update(self) -> bool:
        """Open a weight-update session. False when the server knows no sessions (older SGLang): just update then."""
        try:
            self._call("POST", "begin_weight_update", {"selector": "all"})
        except EngineError as error:
            if error.status == 404:
                return False
            raise
        return True

    def end_weight_update(self) -> None:
        self._call("POST", "end_weight_update", {})

    def update_weights_from_tensor(
        self,
        payloads: Sequence[str],
        *,
        weight_version: str | None = None,
        load_format: LoadFormat | None = None,
        flush_cache: bool = False,
    ) -> None:
        """payloads: one base64 pickle for each tensor-parallel rank of the engine, of [(HF name, tensor), ...] or,
        with load_format "flattened_bucket", of {"flattened_tensor": uint8 tensor, "metadata": [...]}."""
        body = {
            "serialized_named_tensors": list(payloads),
            "load_format": load_format,
            "flush_cache": flush_cache,
            "weight_version": weight_version,
        }
        self._call("POST", "update_weights_from_tensor", body)

    def init_weights_update_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Blocks until all `world_size` members have joined: call it beside the trainer's own join."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        self._call("POST", "init_weights_update_group", body)

    def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        weight_version: str | None = None,
        load_format: LoadFormat | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Receive `names` by broadcasts from rank 0 of the group; dtypes like "float32". Blocks until they arrived."""
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": load_format,
            "flush_cache": flush_cache,
            "weight_version": weight_version,
        }
        self._call("POST", "update_weights_from_distributed", body)

    def destroy_weights_update_group(self, group_name: str) -> None:
        self._call("POST", "destroy_weights_update_group", {"group_name": group_name})

    def update_weights_from_disk(self, model_path: str, *, weight_version: str, flush_cache: bool = True) -> None:
        """Reload every weight from a Hugging Face directory that the engine's machine can read. Needs no session."""
        # "auto": without it a server that started with random weights would refuse to read any
        body = {
            "model_path": model_path,
            "load_format": "auto",
            "weight_version": weight_version,
            "flush_cache": flush_cache,
        }
        self._call("POST", "update_weights_from_disk", body)

    def update_weight_version(self, weight_version: str) -> None:
        """Name the weights that the engine now has; new samples carry the name."""
        self._call("POST", "update_weight_version", {"new_version": weight_version, "abort_all_requests": False})

    def weights_checksum(self) -> list[RankChecksums]:
        """The hash of every parameter, a list over the engine's tensor-parallel ranks in rank order.

        On CPU a hash is the first 8 bytes of SHA-256 over the parameter's contiguous bytes, as 16 hex digits
        (`mrl.rollout.checksum.tensor_checksum`). Names are the engine's own fused ones (qkv_proj, gate_up_proj).
        """
        return self._call("POST", "weights_checker", {"action": "checksum"}, read=read_checksums)

    # ---- the wire

    def _call(
        self,
        method: str,
        endpoint: str,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        *,
        read: Callable[[Any], T] = lambda answer: answer,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """What `read` makes of the answer; it raises BadAnswer if it is not what it should be."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        reply = self._send(method, endpoint, body, limit, headers)
        if reply.status_code != 200:
            raise EngineError(self.url, endpoint, reply.status_code, error_message(reply.content))
        if not reply.headers.get("content-type", "").startswith("application/json"):
            return read(None)
        try:
            answer = from_json(reply.content)
            if isinstance(answer, dict) and answer.get("success") is False:
                raise EngineError(self.url, endpoint, reply.status_code, str(answer.get("message", answer))[:MOST_TEXT])
            return read(answer)
        except BadAnswer as error:
            raise EngineError(self.url, endpoint, reply.status_code, str(error)) from error

    def _send(
        self, method: str, endpoint: str, body: Any, limit: float, headers: Mapping[str, str] | None
    ) -> httpx.Response:
        """The whole answer, which must be there after `limit` seconds."""
        self._access.check(self.url, endpoint)
        end = time.monotonic() + limit
        request = self._http.build_request(
            method, f"/{endpoint}", json=body, headers=headers, timeout=self._timeout(limit)
        )
        try:
            reply = self._http.send(request, stream=True)
            with contextlib.closing(reply):
                parts = []
                for part in reply.iter_bytes():
                    parts.append(part)
                    if time.monotonic() > end:
                        raise httpx.ReadTimeout("it answers byte by byte")
        except httpx.TimeoutException as error:
            raise EngineError(self.url, endpoint, None, f"{type(error).__name__} after {limit:g} s") from error
        except httpx.HTTPError as error:
            raise EngineError(self.url, endpoint, None, f"{type(error).__name__}: {error}") from error
        kind = {"Content-Type": reply.headers.get("content-type", "")}
        return httpx.Response(reply.status_code, headers=kind, content=b"".join(parts))

    @staticmethod
    def _timeout(limit: float) -> httpx.Timeout:
        return httpx.Timeout(limit, connect=min(CONNECT_TIMEOUT_S, limit))
