"""Blocking HTTP client of one engine: one method for each endpoint of the protocol.

Every call has a time-out; every failure is an `EngineError` with the engine's URL, the endpoint and the answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack

import httpx

from mrl.inference import protocol
from mrl.inference.access import OPEN, Access, tls
from mrl.inference.answers import MOST_BYTES, PLAIN, Incoming, error_message, from_json, told
from mrl.inference.errors import BadAnswer, EngineError
from mrl.inference.protocol import (
    BroadcastBody,
    Endpoint,
    GenerateBody,
    GroupBody,
    LoadFormat,
    MemoryPart,
    ModelInfo,
    RankChecksums,
)
from mrl.inference.server_info import ServerInfo

CONNECT_TIMEOUT_S = 10.0
FLUSH_AGAIN_S = 0.05
DENIED = (401, 403)
Answer = TypeVar("Answer")


class EngineClient:
    """Client of one engine. Thread-safe; connections are kept alive.

    timeout_s: limit for each answer. Every method raises EngineError on a time-out, a refused or broken connection, a
    status other than 200, or `success: false`.
    """

    def __init__(self, url: str, timeout_s: float = 300.0, access: Access = OPEN) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._access = access
        # trust_env=False: a proxy set for the internet must not see engine traffic
        self._http = httpx.Client(
            base_url=self.url,
            headers=access.headers | PLAIN,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
            verify=tls(),
        )

    def close(self) -> None:
        self._http.close()

    # ---- generation

    def generate(self, body: GenerateBody, timeout_s: float | None = None) -> Any:
        """Returns the raw answer, not yet checked. timeout_s: instead of the client's"""
        return self._call(protocol.GENERATE, body, timeout_s)

    def abort_all(self) -> None:
        """Ends every request that runs or waits, whoever sent it. Each is answered with the tokens that it has."""
        self._call(protocol.ABORT, {"rid": "", "abort_all": True})

    def flush_cache(self) -> None:
        """Forget every cached prefix. Refused with 400 while requests run."""
        self._call(protocol.FLUSH_CACHE)

    def flush_when_idle(self, timeout_s: float) -> None:
        """`flush_cache`, once no request runs any more; refused as there after `timeout_s` seconds."""
        end = time.monotonic() + timeout_s
        while True:
            self.timeout_s = max(0.1, end - time.monotonic())
            try:
                return self.flush_cache()
            except EngineError as error:
                if error.status != 400 or time.monotonic() > end:
                    raise
            time.sleep(FLUSH_AGAIN_S)

    # ---- memory

    def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Gives up these parts, none of which may be given up already, of an engine that has nothing to do."""
        self._call(protocol.RELEASE_MEMORY, protocol.MemoryBody(tags=list(parts)))

    def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Takes back these parts, all of which must be given up. Weights and KV cache then hold anything."""
        self._call(protocol.RESUME_MEMORY, protocol.MemoryBody(tags=list(parts)))

    # ---- state

    def is_up(self) -> bool:
        """Returns True if the engine responds with status 200."""
        with contextlib.suppress(EngineError):
            return self._send(protocol.MODEL_INFO).status_code == 200
        return False

    def is_let_in(self, host: str) -> bool:
        """False if the engine refuses one who has not its key, if there is one, and asks under this host name; what it
        says to one whom it lets in does not matter."""
        reply = self._send(protocol.MODEL_INFO, headers={"Host": host})
        if reply.status_code not in (200, 400, *DENIED):
            raise EngineError(self.url, protocol.MODEL_INFO.name, reply.status_code, error_message(reply.content))
        return reply.status_code == 200

    def model_info(self) -> ModelInfo:
        """Returns the model that the engine serves, and the version of its weights."""
        return self._call(protocol.MODEL_INFO)

    def server_info(self) -> ServerInfo:
        return self._call(protocol.SERVER_INFO)

    def workers(self) -> tuple[str, ...] | None:
        """The engines that it hands requests on to, if it is a router; None: it is an engine."""
        for endpoint in (protocol.ROUTER_WORKERS, protocol.OLD_ROUTER_WORKERS):
            try:
                return self._call(endpoint)
            except EngineError as error:
                if error.status is None:  # nobody answers: no use to wait for that twice
                    break
        return None

    # ---- weights

    def begin_weight_update(self) -> bool:
        """Open a weight-update session. False when the server knows no sessions (older SGLang): just update then."""
        try:
            self._call(protocol.BEGIN_UPDATE, {"selector": "all"})
        except EngineError as error:
            if error.status == 404:
                return False
            raise
        return True

    def end_weight_update(self) -> None:
        """Close the session; refused with 400 where none is open."""
        self._call(protocol.END_UPDATE, {})

    def update_weights_from_tensor(
        self, payloads: Sequence[str], *, weight_version: str | None = None, load_format: LoadFormat | None = None
    ) -> None:
        """payloads: one base64 pickle for each tensor-parallel rank of the engine (see `protocol.TensorsBody`)."""
        body = protocol.TensorsBody(
            serialized_named_tensors=list(payloads),
            load_format=load_format,
            flush_cache=False,
            weight_version=weight_version,
        )
        self._call(protocol.UPDATE_FROM_TENSOR, body)

    def init_weights_update_group(self, **group: Unpack[GroupBody]) -> None:
        """Blocks until all `world_size` members have joined: call it beside the trainer's own join."""
        self._call(protocol.JOIN_GROUP, group)

    def update_weights_from_distributed(self, **bucket: Unpack[BroadcastBody]) -> None:
        """Receives tensors by broadcasts from rank 0 of the group. Blocks until they have arrived."""
        self._call(protocol.UPDATE_FROM_BROADCAST, {**bucket, "flush_cache": False})

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave the process group, which also ends a broadcast that the engine waits in."""
        self._call(protocol.LEAVE_GROUP, {"group_name": group_name})

    def update_weights_from_disk(self, model_path: str, *, weight_version: str) -> None:
        """Reload every weight from a Hugging Face directory that the engine's machine can read. Needs no session."""
        body = protocol.DiskBody(
            model_path=model_path, load_format="auto", weight_version=weight_version, flush_cache=True
        )
        self._call(protocol.UPDATE_FROM_DISK, body)

    def load_adapter(
        self, name: str, config: Mapping[str, Any], payloads: Sequence[str], checksums: Mapping[str, str] | None
    ) -> tuple[str, ...]:
        """The names of all adapters that it has now; see `protocol.AdapterBody`."""
        body = protocol.AdapterBody(
            lora_name=name,
            config_dict=dict(config),
            serialized_named_tensors=list(payloads),
            expected_checksums=None if checksums is None else dict(checksums),
        )
        return self._call(protocol.LOAD_ADAPTER, body)

    def unload_adapter(self, name: str) -> None:
        """Blocks until no request uses it. Refused with 400 where it is not known."""
        self._call(protocol.UNLOAD_ADAPTER, {"lora_name": name})

    def update_weight_version(self, weight_version: str) -> None:
        """Name the weights that the engine now has; new samples carry the name."""
        self._call(protocol.UPDATE_VERSION, {"new_version": weight_version, "abort_all_requests": False})

    def weights_checksum(self) -> list[RankChecksums]:
        """The hash of every parameter, a list over the engine's tensor-parallel ranks in rank order.

        On CPU a hash is the first 8 bytes of SHA-256 over the parameter's contiguous bytes, as 16 hex digits
        (`mrl.weights.sync.checksum`). Names are the engine's own fused ones (qkv_proj, gate_up_proj).
        """
        return self._call(protocol.CHECKSUMS, {"action": "checksum"})

    # ---- the wire

    def _call(
        self, endpoint: Endpoint[Answer], body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Answer:
        """Sends a request and returns what the endpoint reads in the answer."""
        reply = self._send(endpoint, body, timeout_s=timeout_s)
        if reply.status_code != 200:
            raise EngineError(self.url, endpoint.name, reply.status_code, error_message(reply.content))
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        try:
            answer = from_json(reply.content) if is_json else None
            if isinstance(answer, dict) and answer.get("success") is False:
                text = told(str(answer.get("message", answer)))
                raise EngineError(self.url, endpoint.name, reply.status_code, text)
            return endpoint.read(answer)
        except BadAnswer as error:
            raise EngineError(self.url, endpoint.name, reply.status_code, str(error)) from error

    def _send(
        self,
        endpoint: Endpoint[Any],
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """The whole answer, which must be there after `timeout_s` seconds, by default the client's."""
        self._access.check(self.url, endpoint.name)
        limit = self.timeout_s if timeout_s is None else timeout_s
        end = time.monotonic() + limit
        timeout = httpx.Timeout(limit, connect=min(CONNECT_TIMEOUT_S, limit))
        request = self._http.build_request(endpoint.method, endpoint.path, json=body, headers=headers, timeout=timeout)
        try:
            reply = self._http.send(request, stream=True)
            with contextlib.closing(reply):
                incoming = Incoming(reply.headers, MOST_BYTES)
                for part in reply.iter_bytes():
                    incoming.take(part)
                    if time.monotonic() > end:
                        raise httpx.ReadTimeout("it answers byte by byte")
        except httpx.TimeoutException as error:
            raise EngineError(self.url, endpoint.name, None, f"{type(error).__name__} after {limit:g} s") from error
        except httpx.HTTPError as error:
            raise EngineError(self.url, endpoint.name, None, f"{type(error).__name__}: {error}") from error
        except BadAnswer as error:
            raise EngineError(self.url, endpoint.name, reply.status_code, str(error)) from error
        kind = {"Content-Type": reply.headers.get("content-type", "")}
        return httpx.Response(reply.status_code, headers=kind, content=incoming.content)
