"""Common base of all weight syncs: the engines, one outcome on every rank, the weight version, and the verification."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from mrl.config.schema import SyncConfig
from mrl.inference.access import OPEN, Access
from mrl.inference.client import EngineClient
from mrl.weights.agreement import SyncAgreement
from mrl.weights.sync.checksum import Key, StreamHasher
from mrl.weights.sync.payload import WeightSource
from mrl.weights.sync.transports import RELAY_GRACE_S, Deadline, Engines, HopCosts
from mrl.weights.sync.verify import Verifier, ask_layout, check

GRACE_S = 2 * RELAY_GRACE_S  # a rank that has just timed out still has to report that to the others
T = TypeVar("T")
Guard = Callable[[str], None]  # of an engine's URL: raises EngineError if that engine must not get weights now


@dataclass(frozen=True)
class SyncReport:
    """Report of one weight sync. seconds: wall time; bytes, tensors: exported; verified: tensors proved equal (none or
    all); hops: seconds and bytes by hop; adapters: name that requests ask for, by name of the run's adapter, if
    adapters were sent.
    """

    seconds: float
    bytes: int
    tensors: int
    verified: int
    transport: str
    hops: HopCosts
    adapters: Mapping[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Returns perf/sync_s and sync/bytes of the whole sync, a byte of the model counted once, and
        perf/sync_gather_s, sync/network_bytes, ... of the hops that were used. A delta sync has sync/changed_share.
        """
        hops = {name: value for name, value in asdict(self.hops).items() if value}
        changed, compared = hops.pop("changed", 0.0), hops.pop("compared", 0.0)
        share = {"sync/changed_share": changed / compared} if compared else {}
        named = {f"perf/sync_{name}" if name.endswith("_s") else f"sync/{name}": value for name, value in hops.items()}
        return {"perf/sync_s": self.seconds, "sync/bytes": float(self.bytes), **named, **share}


class EngineSync(ABC):
    """Keeps engines at some weights. Construction is collective over the world and contacts no engine.

    proved: the weights that engines are verified against
    engine_tensor: tensor-parallel size of each engine. access: credentials. guard: rank 0's.
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
    ) -> None:
        self._proved, self._cfg, self._access, self._guard = proved, sync, access, guard
        self._agreement = SyncAgreement(sync.timeout_s + GRACE_S)
        self._rank = self._agreement.rank
        clients = tuple(EngineClient(url, sync.timeout_s, access) for url in urls)
        self._engines = Engines(clients, engine_tensor, Deadline(sync.timeout_s))
        self._version = ""
        self._verifier: Verifier | None = None

    def update_weights(self, version: str, *, verify: bool = False) -> SyncReport:
        """Syncs every engine to the current weights as weight version `version`; collective over all ranks.

        Flushes prefix caches. With sync.verify, or with `verify` for this sync alone, every parameter of every engine
        is compared with the trainer's. Raises SyncError, or SyncMismatch from the comparison, the same on every rank,
        within sync.timeout_s, plus GRACE_S if ranks wait for each other.
        """
        self._version = version
        return self._timed(verify=verify or self._cfg.verify == "checksum", again=False)

    def resync(self, url: str) -> SyncReport:
        """Syncs the engine at `url`, which was restarted or has joined, to the weights and version of the last sync;
        collective over all ranks, which must not have changed the weights since. Always verified; raises as
        `update_weights`.
        """
        urls = [client.url for client in self._engines.clients]
        self.set_engines([*urls, *({url} - {*urls})], [url])
        with self._engines.only(url):
            return self._timed(verify=True, again=True)

    def mark_restarted(self, urls: Sequence[str]) -> None:
        """Marks the engines at these addresses as new processes; local, to be called on every rank, as
        `set_engines`."""
        self.set_engines([client.url for client in self._engines.clients], urls)

    def set_engines(self, urls: Sequence[str], new: Sequence[str] = ()) -> None:
        """Sets the engines; local, to be called on every rank. new: addresses whose engine is a new process."""
        known = {client.url: client for client in self._engines.clients}
        for url, client in known.items():
            if url in new or url not in urls:
                self._forget(client)
            if url not in urls:
                client.close()
        made = [known.get(url) or EngineClient(url, self._cfg.timeout_s, self._access) for url in urls]
        self._engines.clients = tuple(made)

    def close(self) -> None:
        """Closes the connections, and leaves the engines as they are; local."""
        for client in self._engines.clients:
            client.close()

    @abstractmethod
    def _update_weights(self, verify: bool, again: bool, started: float) -> SyncReport:
        """Syncs. again: for an engine that lacks the last sync; started: time.monotonic() at the start"""

    @abstractmethod
    def _forget(self, client: EngineClient) -> None:
        """Forgets an engine that has gone, or is a new process."""

    def _timed(self, verify: bool, again: bool) -> SyncReport:
        self._engines.deadline = Deadline(self._cfg.timeout_s)
        return self._update_weights(verify, again, time.monotonic())

    def _check_guard(self) -> None:
        for client in self._engines.clients:
            if self._guard is not None:
                self._guard(client.url)

    def _settle(self, version: str) -> None:
        """Flushes the engines' prefix caches and sets their weight version. Waits for running requests of others, such
        as health checks.
        """
        self._engines.call(lambda client: client.flush_when_idle(self._engines.deadline.left()))
        self._engines.call(lambda client: client.update_weight_version(version))

    # ---- verification

    def _get_verifier(self) -> Verifier:
        """Learns the engines' parameters, in the first verified sync only."""
        if self._verifier is None:
            asked = self._on_rank_0("asking the engines for checksums", lambda: ask_layout(self._engines))
            self._verifier = Verifier(*asked, self._proved.metas(), self._proved.arch)
        return self._verifier

    def _expected(self, verifier: Verifier, hasher: StreamHasher) -> Mapping[Key, str]:
        """Returns the trainer's hashes, after `hasher` has seen this rank's part of the stream. Collective."""
        return verifier.expected(hasher, self._agreement)

    def _verify(self, verifier: Verifier, expected: Mapping[Key, str]) -> None:
        self._on_rank_0("verifying the engines' weights", lambda: check(verifier, self._engines, expected))

    # ---- collective calls

    def _everywhere(self, doing: str, action: Callable[[], T]) -> list[T]:
        """Runs `action` on every rank; returns all results, by rank, or raises one SyncError on every rank."""
        return self._agreement.each(self._at(doing), action)

    def _on_rank_0(self, doing: str, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0; returns its result, or raises its error, on every rank."""
        return self._agreement.on_main(self._at(doing), action)

    def _at(self, doing: str) -> str:
        return f"weight sync to version {self._version}: {doing}"
