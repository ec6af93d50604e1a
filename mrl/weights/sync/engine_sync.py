"""What every way of keeping engines at the trainer's weights has in common: who the engines are, one outcome on every
rank, the name of the weights, and the proof that they have arrived."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from mrl.config.schema import SyncConfig
from mrl.rollout.access import OPEN, Access
from mrl.rollout.client import EngineClient
from mrl.rollout.errors import EngineError
from mrl.weights.agreement import SyncAgreement
from mrl.weights.sync.checksum import Key, StreamHasher
from mrl.weights.sync.payload import WeightSource
from mrl.weights.sync.transports import RELAY_GRACE_S, Deadline, Engines, Hops
from mrl.weights.sync.verify import Verifier, ask_shape, check

CLEANUP_TIMEOUT_S = 5.0
GRACE_S = 2 * RELAY_GRACE_S  # a rank whose own wait has just timed out still has to say so to the others
T = TypeVar("T")
Guard = Callable[[str], None]  # of an engine's URL: raises EngineError if that engine must not get weights now


@dataclass(frozen=True)
class SyncReport:
    """seconds: wall time; bytes, tensors: what was exported; verified: tensors proved equal (none or all); hops: where
    seconds and bytes went; adapter: the name that requests have to ask for, where adapters were sent."""

    seconds: float
    bytes: int
    tensors: int
    verified: int
    transport: str
    hops: Hops
    adapter: str | None = None

    def metrics(self) -> dict[str, float]:
        """perf/sync_s, sync/bytes: of the whole push, a byte of the model counted once; perf/sync_gather_s,
        sync/network_bytes, ...: the hops that there were."""
        hops = {name: value for name, value in asdict(self.hops).items() if value}
        named = {f"perf/sync_{name}" if name.endswith("_s") else f"sync/{name}": value for name, value in hops.items()}
        return {"perf/sync_s": self.seconds, "sync/bytes": float(self.bytes), **named}


class EngineSync(ABC):
    """Keeps engines at some weights. Construction is collective over the world and asks no engine.

    proved: the weights whose bytes engines are asked for
    engine_tensor: tensor-parallel size of each engine. access: what opens them. guard: rank 0's.
    in_flight: requests may be running: they are held for the push, and go on by the new weights
    """

    def __init__(
        self,
        proved: WeightSource,
        urls: Sequence[str],
        sync: SyncConfig,
        engine_tensor: int = 1,
        *,
        access: Access = OPEN,
        guard: Guard | None = None,
        in_flight: bool = False,
    ) -> None:
        self._in_flight = in_flight
        self._proved, self._cfg, self._access, self._guard = proved, sync, access, guard
        self._agreement = SyncAgreement(sync.timeout_s + GRACE_S)
        self._rank = self._agreement.rank
        clients = tuple(EngineClient(url, sync.timeout_s, access) for url in urls)
        self._engines = Engines(clients, engine_tensor, Deadline(sync.timeout_s))
        self._version = ""
        self._verifier: Verifier | None = None

    def push(self, version: str, *, verify: bool = False) -> SyncReport:
        """Brings every engine to the current weights and names them `version`; collective over all ranks.

        Prefix caches are flushed. With sync.verify, or with `verify` for this push alone, every parameter of every
        engine is compared with what was sent.
        Raises SyncError, or SyncMismatch from the comparison, the same on every rank, within sync.timeout_s, and within
        GRACE_S more where ranks wait for each other.
        """
        self._version = version
        return self._timed(verify=verify or self._cfg.verify == "checksum", again=False)

    def restore(self, url: str) -> SyncReport:
        """Brings the engine at `url`, which was started anew or has come, to the weights and the name that the last
        push gave to all; collective over all ranks, which must not have changed them since. Always verified; raises as
        `push`."""
        urls = [client.url for client in self._engines.clients]
        self.use([*urls, *({url} - {*urls})], [url])
        with self._engines.only(url):
            return self._timed(verify=True, again=True)

    def renew(self, urls: Sequence[str]) -> None:
        """The engines at these addresses are other processes than they were; as `use`."""
        self.use([client.url for client in self._engines.clients], urls)

    def use(self, urls: Sequence[str], new: Sequence[str] = ()) -> None:
        """From now on these are the engines; local, to be called on every rank. new: those that are other processes
        than had these addresses before."""
        known = {client.url: client for client in self._engines.clients}
        for url, client in known.items():
            if url in new or url not in urls:
                self._forget(client)
            if url not in urls:
                client.close()
        made = [known.get(url) or EngineClient(url, self._cfg.timeout_s, self._access) for url in urls]
        self._engines.clients = tuple(made)

    def close(self) -> None:
        """Leaves the engines as they are; local."""
        for client in self._engines.clients:
            client.close()

    @abstractmethod
    def _push(self, verify: bool, again: bool, started: float) -> SyncReport:
        """again: for an engine that lacks what the last push gave to all; started: time.monotonic() at the start"""

    @abstractmethod
    def _forget(self, client: EngineClient) -> None:
        """The engine has gone, or is a new process."""

    def _timed(self, verify: bool, again: bool) -> SyncReport:
        self._engines.deadline = Deadline(self._cfg.timeout_s)
        started = time.monotonic()
        if not self._in_flight:
            return self._push(verify, again, started)
        try:
            self._on_rank_0("pausing the engines", lambda: self._engines.call(EngineClient.pause))
            report = self._push(verify, again, started)
        except BaseException:
            self._go_on_all_the_same()
            raise
        self._on_rank_0("letting the engines go on", lambda: self._engines.call(EngineClient.go_on))
        return report

    def _go_on_all_the_same(self) -> None:
        """After a failure: an engine that is left paused would be mute. It may be gone, which is no news."""
        if self._rank == 0:
            with contextlib.suppress(EngineError):
                self._engines.call(EngineClient.go_on, CLEANUP_TIMEOUT_S)

    def _check_guard(self) -> None:
        for client in self._engines.clients:
            if self._guard is not None:
                self._guard(client.url)

    def _settle(self, version: str) -> None:
        """The engines forget cached prefixes, and have the name of what they hold now. A request that is none of ours,
        a health check perhaps, may be running: it is waited for."""
        self._engines.call(self._flush)
        self._engines.call(lambda client: client.update_weight_version(version))

    def _flush(self, client: EngineClient) -> None:
        if not self._in_flight:
            return client.flush_when_idle(self._engines.deadline.left())
        try:
            client.flush_cache()
        except EngineError as error:
            if error.status != 400:
                raise
            text = f"{error.text} (paused, as rollout.overlap: bounded needs: is this SGLang older than 0.5.23?)"
            raise EngineError(client.url, error.endpoint, error.status, text) from error

    # ---- the proof

    def _get_verifier(self) -> Verifier:
        """First verified push only: learn the engines' parameters."""
        if self._verifier is None:
            asked = self._on_rank_0("asking the engines for checksums", lambda: ask_shape(self._engines))
            self._verifier = Verifier(*asked, self._proved.metas(), self._proved.arch)
        return self._verifier

    def _expected(self, verifier: Verifier, hasher: StreamHasher) -> Mapping[Key, str]:
        """The trainer's hashes, once `hasher` has seen this rank's part of the stream. Collective."""
        return verifier.expected(hasher, self._agreement)

    def _verify(self, verifier: Verifier, expected: Mapping[Key, str]) -> None:
        self._on_rank_0("verifying the engines' weights", lambda: check(verifier, self._engines, expected))

    # ---- together

    def _everywhere(self, doing: str, action: Callable[[], T]) -> list[T]:
        """`action` on every rank; all results, by rank, or one SyncError on every rank."""
        return self._agreement.each(self._at(doing), action)

    def _on_rank_0(self, doing: str, action: Callable[[], T]) -> T:
        """`action` on rank 0; its result, or its error, on every rank."""
        return self._agreement.on_main(self._at(doing), action)

    def _at(self, doing: str) -> str:
        return f"weight sync to version {self._version}: {doing}"
