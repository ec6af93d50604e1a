"""Weight sync from the trainer to running engines.

A sync is collective over all ranks and has phases: open a session, prepare, send, close, verify. All ranks agree on the
outcome after each phase: if any rank fails, every rank raises the same error and stops waiting for engines and ranks.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from mrl import platform
from mrl.config.schema import SyncConfig
from mrl.families.engine_names import joined_tensors
from mrl.inference.access import OPEN, Access
from mrl.inference.client import EngineClient
from mrl.inference.delta import LOADER
from mrl.inference.errors import EngineError
from mrl.parallel import Nodes
from mrl.weights.errors import SyncError, SyncMismatch, WeightError
from mrl.weights.sync import transports
from mrl.weights.sync.checksum import StreamHasher
from mrl.weights.sync.delta import DeltaState, Transition
from mrl.weights.sync.engine_sync import EngineSync, Guard, SyncReport
from mrl.weights.sync.filler import BucketFiller
from mrl.weights.sync.payload import Bucket, WeightSource, plan_buckets
from mrl.weights.sync.transports import (
    HopCosts,
    MultiNodeEngineTransport,
    MultiNodeTransport,
    NodeTopology,
    SenderLocation,
    Transport,
)

CLEANUP_TIMEOUT_S = 5.0

__all__ = ["SyncError", "SyncMismatch", "SyncReport", "WeightSync"]


class WeightSync(EngineSync):
    """Keeps engines at the weights of `exporter`. Construction is collective over the world and contacts no engine.

    engine_tensor: tensor-parallel size of each engine. access: credentials for the engines.
    directory: target of the disk transport, under the same path on all senders and engines; if None a temporary
    directory, which requires a single machine. plain: as in `transports.resolve`.
    nodes, homes: nodes of the world, and the nodes of each engine that the run started, by its address, in the order of
    its tensor-parallel ranks; with several nodes only.
    apart: the engines have nodes of their own, on whatever machine: single-machine transports are not used.
    guard: on rank 0, takes an engine's URL; raises EngineError if that engine must not get weights now.
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
        homes: Mapping[str, tuple[int, ...]] | None = None,
        apart: bool = False,
        guard: Guard | None = None,
    ) -> None:
        super().__init__(exporter, urls, sync, engine_tensor, access=access, guard=guard)
        self._exporter, self._directory, self._plain, self._apart = exporter, directory, plain, apart
        self._metas = exporter.metas()
        self._senders = tuple(sorted({meta.sender for meta in self._metas}))
        self._buckets = self._plan(self._rank)
        self._topology: NodeTopology | None = None
        if nodes is not None and homes:
            topology = NodeTopology(nodes, homes, {sender: self._plan(sender) for sender in self._senders})
            self._topology = topology if topology.is_over_nodes else None
        self._delta = DeltaState(sync.delta.full_every) if sync.delta is not None else None
        self._delta_version = ""  # name of the weights that the last sync left in the engines
        self._open_sessions: list[EngineClient] = []  # rank 0's
        self._transport: Transport | None = None

    def _update_weights(self, verify: bool, again: bool, started: float) -> SyncReport:
        transport, delta = self._connect(), self._delta
        if delta is not None:
            now = self._on_rank_0("asking the engines for their weights", lambda: self._transition(delta, again))
            delta.begin(now, again)
            verify = verify or (now.base is not None and not delta.is_proved)
        verifier = self._get_verifier() if verify else None
        hasher = verifier.hasher(self._rank) if verifier is not None else None
        try:
            self._on_rank_0("opening the update", lambda: self._begin(transport))
            self._everywhere("preparing to send", lambda: self._prepare(transport))
            hops = HopCosts.combine(self._everywhere("sending", lambda: self._send(transport, hasher)))
            self._on_rank_0("finishing the update", lambda: self._commit(transport, self._version))
        except BaseException:
            transport.release(failed=True)
            self._abandon_sessions()
            raise
        transport.release(failed=False)
        if verifier is not None and hasher is not None:
            self._verify(verifier, self._expected(verifier, hasher))
        if delta is not None:
            delta.is_proved = delta.is_proved or delta.now.base is not None
            delta.commit()
            self._delta_version = self._version
        return SyncReport(
            seconds=time.monotonic() - started,
            bytes=sum(meta.nbytes for meta in self._metas),
            tensors=len(self._metas),
            verified=len(self._metas) if verifier is not None else 0,
            transport=transport.name,
            hops=hops,
        )

    def close(self) -> None:
        """Leaves the engines' process groups and removes temporary files; local."""
        if self._transport is not None:
            self._transport.close()
        super().close()

    def _forget(self, client: EngineClient) -> None:
        if self._transport is not None:
            self._transport.forget(client)

    def _plan(self, sender: int) -> tuple[Bucket, ...]:
        at_once = joined_tensors(self._exporter.arch)
        return plan_buckets([m for m in self._metas if m.sender == sender], self._cfg.bucket_mib << 20, at_once)

    # ---- phases

    def _connect(self) -> Transport:
        """Returns the transport, which the first sync chooses."""
        if self._transport is None:
            self._choose_transport()
        assert self._transport is not None
        return self._transport

    def _choose_transport(self) -> None:
        topology, wanted = self._topology, self._cfg.transport
        if topology is not None and (wanted == "auto" or transports.TRANSPORTS[wanted].one_machine):
            kind = transports.TRANSPORTS[transports.resolve(wanted, True, None, self._plain)]
            location = SenderLocation(self._rank, platform.device(), None)
            way = MultiNodeEngineTransport if topology.nodes_per_engine > 1 else MultiNodeTransport
            made = self._everywhere(
                f"setting up transport {kind.name} over nodes",
                lambda: setattr(self, "_transport", way(kind, self._engines, location, topology)),
            )
            assert made
            return
        hosts = self._everywhere("comparing host names", socket.gethostname)
        here = {hosts[0], *(hosts[sender] for sender in self._senders)}
        one_machine = not self._apart and topology is None and len(here) == 1

        def decide() -> tuple[str, Path | None]:
            colocated = one_machine and transports.is_local([client.url for client in self._engines.clients])
            name = transports.resolve(self._cfg.transport, colocated, self._directory, self._plain)
            if self._delta is not None and not transports.TRANSPORTS[name].sends_deltas:
                raise WeightError(f"sync.delta supports sync.transport http and distributed, not {name}")
            needs_directory = transports.TRANSPORTS[name].needs_directory
            return name, transports.make_directory(self._directory) if needs_directory else None

        name, directory = self._on_rank_0("choosing a transport", decide)

        def build() -> None:
            location = SenderLocation(self._rank, platform.device(), directory)
            self._transport = transports.TRANSPORTS[name](self._engines, location)
            self._transport.delta = self._delta

        self._everywhere(f"setting up transport {name}", build)

    def _begin(self, transport: Transport) -> None:
        self._check_guard()
        if transport.uses_session:
            self._engines.call(self._begin_session)
        self._tell_delta(transport, "open")

    def _tell_delta(self, transport: Transport, step: Literal["open", "close"]) -> None:
        if self._delta is not None:
            transport.send_delta(self._delta.message(step), torch.empty(0, dtype=torch.uint8))

    def _transition(self, delta: DeltaState, again: bool) -> Transition:
        """Decides on rank 0 between changes and whole weights. Raises WeightError if an engine cannot load changes."""
        behind: list[str] = []

        def ask(client: EngineClient) -> None:
            if not client.server_info().loads_deltas:
                raise WeightError(
                    f"engine {client.url} cannot load the changes of sync.delta: install mrl there and start it with "
                    f"--custom-weight-loader {LOADER}, or remove sync.delta"
                )
            if client.model_info().weight_version != self._delta_version:
                behind.append(client.url)

        self._engines.call(ask)
        return delta.next(again, not behind)

    def _prepare(self, transport: Transport) -> None:
        if self._buckets:
            transport.prepare(self._buckets)

    def _send(self, transport: Transport, hasher: StreamHasher | None) -> HopCosts:
        """Exhausts the export stream even after an error: other ranks gather their shards in it."""
        filler = BucketFiller(transport, self._buckets, hasher)
        problem: Exception | None = None
        transport.hops, began = HopCosts(), time.monotonic()
        with transport.relaying():
            for name, tensor in self._exporter.stream():
                if problem is None:
                    try:
                        filler.add(name, tensor)
                    except Exception as caught:  # raised after the stream ends
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
        self._tell_delta(transport, "close")
        self._engines.call(self._end_session)
        self._settle(version)

    def _begin_session(self, client: EngineClient) -> None:
        if client.begin_weight_update():
            self._open_sessions.append(client)

    def _end_session(self, client: EngineClient) -> None:
        if client in self._open_sessions:
            self._open_sessions.remove(client)
            client.end_weight_update()

    def _abandon_sessions(self) -> None:
        """Closes sessions after a failure: an engine in a session would refuse the next sync. An engine that is gone is
        ignored.
        """
        with contextlib.suppress(EngineError):
            self._engines.call(self._end_session, CLEANUP_TIMEOUT_S)
        self._open_sessions.clear()
