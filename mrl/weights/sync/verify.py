"""Verification that the engines hold the trainer's bytes: one hash a parameter, on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mrl.families import ModelArch
from mrl.families.engine_names import DERIVED
from mrl.families.table import HF_OUTPUT
from mrl.inference.client import EngineClient
from mrl.inference.protocol import RankChecksums, ServerInfo
from mrl.weights.agreement import SyncAgreement
from mrl.weights.errors import SyncMismatch, WeightError
from mrl.weights.meta import TensorMeta
from mrl.weights.sync.checksum import Key, Mismatch, ParamHash, Sha256Hash, StreamHasher, TileHash
from mrl.weights.sync.engine_params import EngineLayout, EngineParam, engine_params
from mrl.weights.sync.transports import Engines

MAX_LISTED = 8


class Verifier:
    """Comparison of the engines' hashes with the trainer's. Construction is local, `expected` is collective.

    Raises WeightError if the engines' parameters and the exported tensors do not cover each other.
    """

    def __init__(
        self, shape: EngineLayout, kind: type[ParamHash], metas: Sequence[TensorMeta], arch: ModelArch
    ) -> None:
        self._kind = kind
        self._senders = {meta.name: meta.sender for meta in metas}
        self._params: dict[Key, EngineParam] = {}
        unknown: list[str] = []
        for rank in range(shape.tensor):
            params, unknown = engine_params(shape, rank, metas, arch)
            self._params |= {(rank, name): param for name, param in params.items()}
        covered = {source for param in self._params.values() for source in param.sources}
        if arch.tied_embeddings:
            covered.add(HF_OUTPUT)
        unheld = [meta.name for meta in metas if meta.name not in covered]
        if unknown or unheld:
            raise WeightError(
                "sync.verify cannot match the engine's parameters with the exported tensors: "
                f"only the engine has {unknown[:MAX_LISTED]}, only the trainer has {unheld[:MAX_LISTED]}"
            )

    def hasher(self, rank: int) -> StreamHasher:
        """Returns the hasher of one sync."""
        return StreamHasher(self._params, self._senders, rank, self._kind)

    def expected(self, hasher: StreamHasher, agreement: SyncAgreement) -> dict[Key, str]:
        """Returns the trainer's hash of every parameter of an engine. Collective."""
        what = "hashing the exported weights"
        for key, holders in hasher.shared():
            mine = hasher.state(key) if agreement.rank in holders[1:] else None
            states = agreement.collect(what, mine, holders[0])
            if states:
                for holder in holders[1:]:
                    hasher.merge(key, states[holder])
        parts = agreement.each(what, hasher.digests)
        return {key: digest for part in parts for key, digest in part.items()}

    def mismatches(self, url: str, expected: Mapping[Key, str], held: Sequence[RankChecksums]) -> list[Mismatch]:
        """Returns the parameters of the engine at `url` whose digest differs from the expected one, including those
        that only one side has.
        """
        has = {(rank.tp_rank, name): digest for rank in held for name, digest in rank.checksums.items()}
        has = {key: digest for key, digest in has.items() if key in expected or not key[1].endswith(DERIVED)}
        found = []
        for key in (*has, *(key for key in expected if key not in has)):
            digest, wanted = has.get(key, "none"), expected.get(key, "none")
            if digest != wanted:
                param = self._params.get(key)
                found.append(Mismatch(url, *key, param.sources if param else (key[1],), wanted, digest))
        return found


def ask_layout(engines: Engines) -> tuple[EngineLayout, type[ParamHash]]:
    """Asks the engines for their parameters and the kind of their hashes. Raises WeightError if the engines differ."""
    shapes: list[tuple[EngineLayout, type[ParamHash]]] = []
    for client in engines.clients:
        client.timeout_s = engines.deadline.left()
        ranks = client.weights_checksum()
        if len(ranks) != engines.tensor:
            raise WeightError(
                f"engine {client.url} has {len(ranks)} tensor-parallel ranks; the sync was for {engines.tensor}"
            )
        names = sorted(name for name in ranks[0].checksums if not name.endswith(DERIVED))
        shapes.append((EngineLayout(tuple(names), len(ranks)), hash_kind(client.server_info())))
    if any(shape != shapes[0] for shape in shapes):
        raise WeightError(f"the engines {[client.url for client in engines.clients]} have different parameters")
    return shapes[0]


def hash_kind(server: ServerInfo) -> type[ParamHash]:
    return TileHash if server.checksum == "tiles" else Sha256Hash


def check(verifier: Verifier, engines: Engines, expected: Mapping[Key, str]) -> None:
    """Raises SyncMismatch unless every hash of every engine is the trainer's."""
    held: dict[str, list[RankChecksums]] = {}

    def ask(client: EngineClient) -> None:
        held[client.url] = client.weights_checksum()

    engines.call(ask)
    found = [m for url, ranks in held.items() for m in verifier.mismatches(url, expected, ranks)]
    if not found:
        return
    total = sum(len(rank.checksums) for ranks in held.values() for rank in ranks)
    listed = "".join(f"\n  - {mismatch}" for mismatch in found[:MAX_LISTED])
    more = f"\n  - and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    hint = "\nAll differ: check that the engine uses the dtype of model.dtype" if len(found) == total else ""
    raise SyncMismatch(f"{len(found)} of {total} engine parameters differ from those sent:{listed}{more}{hint}")
