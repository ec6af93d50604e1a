"""Pushing the trainer's weights into running engines.

A push is collective over all ranks and goes in phases: open a session, prepare, send, close, verify. After each phase
all ranks agree on its outcome, so that whatever fails on whichever rank, every rank raises the same error and none
waits for the engine or for another rank any longer.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from mrl import platform
from mrl.config.schema import SyncConfig
from mrl.parallel import Nodes
from mrl.rollout.access import OPEN, Access
from mrl.rollout.client import EngineClient
from mrl.rollout.errors import EngineError
from mrl.weights.agreement import SyncAgreement
from mrl.weights.errors import SyncError, SyncMismatch
from mrl.weights.sync import transports
from mrl.weights.sync.checksum import StreamHasher
from mrl.weights.sync.filler import Filler
from mrl.weights.sync.payload import Bucket, WeightSource, plan_buckets
from mrl.weights.sync.transports import Deadline, Engines, Hops, OverNodes, Place, Spread, Transport
from mrl.weights.sync.verify import Verifier, ask_shape, check

__all__ = ["SyncError", "SyncMismatch", "SyncReport", "WeightSync"]

GRACE_S = 20.0  # a rank whose own wait has just timed out still has to say so to the others
CLEANUP_TIMEOUT_S = 5.0
T = TypeVar("T")


@dataclass(frozen=True)
class SyncReport:
    """seconds: wall time; bytes, tensors: what was exported; verified: tensors proved equal (none or all); hops: where
    seconds and bytes went."""

    seconds: float
    bytes: int
    tensors: int
    verified: int
    transport: str
    hops: Hops

    def metrics(self) -> dict[str, float]:
        """perf/sync_gather_s, sync/network_bytes, ...: the hops that there were."""
        hops = {name: value for name, value in asdict(self.hops).items() if value}
        return {f"perf/sync_{name}" if name.endswith("_s") else f"sync/{name}": value for name, value in hops.items()}


class WeightSync:
    """Keeps engines at the weights of `exporter`. Construction is collective over the world and asks no engine.

    engine_tensor: tensor-parallel size of each engine. access: what opens them.
    directory: where the disk transport writes, seen by all senders and engines under the same path; a temporary
    directory, which needs one machine, when None. plain: as `transports.resolve` takes it.
    nodes, homes: of the world, and the node of each engine that the run started, by its address, where there are
    several nodes.
    guard: rank 0's, of an engine's URL: raises EngineError if that engine must not get weights now.
    """

    def __init__(
        self,
        exporter: WeightSource,
        urls: Sequence[str],
        sync: SyncConfig,
        engine_tensor: int = 1,
        *,
        access: Access = OPEN,
        directory: Path | None = None,
        plain: bool = False,
        nodes: Nodes | None = None,
        homes: Mapping[str, int] | None = None,
        guard: Callable[[str], None] | None = None,
    ) -> None:
        self._exporter, self._cfg, self._directory, self._plain = exporter, sync, directory, plain
        self._guard = guard
        self._agreement = SyncAgreement(sync.timeout_s + GRACE_S)
        self._rank = self._agreement.rank
        self._metas = exporter.metas()
        self._senders = tuple(sorted({meta.sender for meta in self._metas}))
        self._buckets = self._plan(self._rank)
        self._spread: Spread | None = None
        if nodes is not None and homes:
            spread = Spread(nodes, homes, {sender: self._plan(sender) for sender in self._senders})
            self._spread = spread if spread.is_over_nodes else None
        clients = tuple(EngineClient(url, sync.timeout_s, access) for url in urls)
        self._engines = Engines(clients, engine_tensor, Deadline(sync.timeout_s))
        self._open_sessions: list[EngineClient] = []  # rank 0's
        self._transport: Transport | None = None
        self._version = ""
        self._verifier: Verifier | None = None

    def push(self, version: str, *, verify: bool = False) -> SyncReport:
        """Brings every engine to the current weights and names them `version`; collective over all ranks.

        Prefix caches are flushed. With sync.verify, or with `verify` for this push alone, every parameter of every
        engine is compared with what was sent.
        Raises SyncError, or SyncMismatch from the comparison, the same on every rank, within sync.timeout_s.
        """
        self._version = version
        return self._push(verify=verify or self._cfg.verify == "checksum")

    def restore(self, url: str) -> SyncReport:
        """Brings the engine at `url`, which was started anew, to the weights and the name that the last push gave to
        all; collective over all ranks, which must not have changed them since. Always verified; raises as `push`."""
        with self._engines.only(url) as client:
            if self._transport is not None:
                self._transport.forget(client)
            return self._push(verify=True)

    def _push(self, verify: bool) -> SyncReport:
        started = time.monotonic()
        self._engines.deadline = Deadline(self._cfg.timeout_s)
        transport = self._connect()
        verifier = self._get_verifier() if verify else None
        hasher = verifier.hasher(self._rank) if verifier is not None else None
        try:
            self._on_rank_0("opening the update", lambda: self._begin(transport))
            self._everywhere("preparing to send", lambda: self._prepare(transport))
            hops = Hops.of_all(self._everywhere("sending", lambda: self._send(transport, hasher)))
            self._on_rank_0("finishing the update", lambda: self._commit(transport, self._version))
        except BaseException:
            transport.release(failed=True)
            self._abandon_sessions()
            raise
        transport.release(failed=False)
        if verifier is not None and hasher is not None:
            self._verify(verifier, hasher)
        return SyncReport(
            seconds=time.monotonic() - started,
            bytes=sum(meta.nbytes for meta in self._metas),
            tensors=len(self._metas),
            verified=len(self._metas) if verifier is not None else 0,
            transport=transport.name,
            hops=hops,
        )

    def close(self) -> None:
        """Leave the engines' process groups and remove temporary files; local."""
        if self._transport is not None:
            self._transport.close()
        for client in self._engines.clients:
            client.close()

    def _plan(self, sender: int) -> tuple[Bucket, ...]:
        return plan_buckets([m for m in self._metas if m.sender == sender], self._cfg.bucket_mib << 20)

    # ---- phases

    def _connect(self) -> Transport:
        """First push only: choose the transport."""
        if self._transport is None:
            self._choose_transport()
        assert self._transport is not None
        return self._transport

    def _get_verifier(self) -> Verifier:
        """First verified push only: learn the engines' parameters."""
        if self._verifier is None:
            asked = self._on_rank_0("asking the engines for checksums", lambda: ask_shape(self._engines))
            self._verifier = Verifier(*asked, self._metas, self._exporter.arch)
        return self._verifier

    def _choose_transport(self) -> None:
        spread, wanted = self._spread, self._cfg.transport
        if spread is not None and (wanted == "auto" or transports.TRANSPORTS[wanted].one_machine):
            kind = transports.TRANSPORTS[transports.resolve(wanted, True, None, self._plain)]
            place = Place(self._rank, platform.device(), None)
            made = self._everywhere(
                f"setting up transport {kind.name} over nodes",
                lambda: setattr(self, "_transport", OverNodes(kind, self._engines, place, spread)),
            )
            assert made
            return
        hosts = self._everywhere("comparing host names", socket.gethostname)
        one_machine = spread is None and len({hosts[0], *(hosts[sender] for sender in self._senders)}) == 1

        def decide() -> tuple[str, Path | None]:
            colocated = one_machine and transports.is_local([client.url for client in self._engines.clients])
            name = transports.resolve(self._cfg.transport, colocated, self._directory, self._plain)
            needs_directory = transports.TRANSPORTS[name].needs_directory
            return name, transports.make_directory(self._directory) if needs_directory else None

        name, directory = self._on_rank_0("choosing a transport", decide)

        def build() -> None:
            place = Place(self._rank, platform.device(), directory)
            self._transport = transports.TRANSPORTS[name](self._engines, place)

        self._everywhere(f"setting up transport {name}", build)

    def _begin(self, transport: Transport) -> None:
        for client in self._engines.clients:
            if self._guard is not None:
                self._guard(client.url)
        if transport.uses_session:
            self._engines.call(self._begin_session)

    def _prepare(self, transport: Transport) -> None:
        if self._buckets:
            transport.prepare(self._buckets)

    def _send(self, transport: Transport, hasher: StreamHasher | None) -> Hops:
        """Runs the export stream to its end even after an error: other ranks gather their shards in it."""
        filler = Filler(transport, self._buckets, hasher)
        problem: Exception | None = None
        transport.hops, began = Hops(), time.monotonic()
        with transport.relaying():
            for name, tensor in self._exporter.stream():
                if problem is None:
                    try:
                        filler.take(name, tensor)
                    except Exception as caught:  # raised when the stream is over
                        problem = caught
            gather_s = time.monotonic() - began - filler.waiting_s
            try:
                filler.delivered()
            except Exception as caught:
                problem = problem or caught
            if problem is not None:
                raise problem
            filler.check_done()
        return replace(transport.hops, gather_s=gather_s if self._buckets else 0.0)

    def _commit(self, transport: Transport, version: str) -> None:
        transport.commit(version)
        self._engines.call(self._end_session)
        # a request that is none of ours, a health check perhaps, may be running: it is waited for
        self._engines.call(lambda client: client.flush_when_idle(self._engines.deadline.left()))
        self._engines.call(lambda client: client.update_weight_version(version))

    def _begin_session(self, client: EngineClient) -> None:
        if client.begin_weight_update():
            self._open_sessions.append(client)

    def _end_session(self, client: EngineClient) -> None:
        if client in self._open_sessions:
            self._open_sessions.remove(client)
            client.end_weight_update()

    def _abandon_sessions(self) -> None:
        """After a failure: an engine left in a session would refuse the next push. It may be gone, which is no news."""
        with contextlib.suppress(EngineError):
            self._engines.call(self._end_session, CLEANUP_TIMEOUT_S)
        self._open_sessions.clear()

    def _verify(self, verifier: Verifier, hasher: StreamHasher) -> None:
        expected = verifier.expected(hasher, self._agreement)
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
