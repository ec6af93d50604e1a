"""Weight sync of the actor's adapters: the engine keeps the base model, and multiplies by A and B beside it, as the
trainer does. Nothing is merged, so nothing is rounded, and a sync is a few megabytes.

SGLang loads an adapter under a new name, and requests ask for it by that name. Settings that SGLang computes
differently from the trainer are refused by `mrl.config.checks.lora`.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl import platform
from mrl.config.schema import SyncConfig
from mrl.families import ModelArch
from mrl.families.adapters import LoRA, adapted_rows, layer_of
from mrl.families.peft import PREFIX, peft_config
from mrl.inference.access import OPEN, Access
from mrl.inference.client import EngineClient
from mrl.inference.errors import EngineError
from mrl.weights.errors import SyncError, WeightError
from mrl.weights.sync.checksum import Key
from mrl.weights.sync.engine_sync import EngineSync, Guard, SyncReport
from mrl.weights.sync.payload import WeightSource, pickle_by_name
from mrl.weights.sync.transports import HopCosts

OURS = "mrl-"  # prefix of the names of adapters that runs have synced
TRANSPORT = "adapter"


@dataclass(frozen=True)
class AdapterSource:
    """Adapters of one policy. exporter: of their tensors, under PEFT's names without prefix; lora: their
    configuration."""

    exporter: WeightSource
    lora: LoRA

    def tensors(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the tensors under PEFT's names, from all ranks' parts, with those that SGLang misses."""
        found = {PREFIX + key: tensor for part in parts for key, tensor in part.items()}
        if len(found) != (expected := len(self.exporter.metas())):
            raise WeightError(f"gathered {len(found)} adapter tensors instead of {expected}")
        missing = missing_adapters(self.exporter.arch, self.lora, found)
        return found | {PREFIX + key: tensor for key, tensor in missing}


class AdapterSync(EngineSync):
    """Keeps engines at the adapters of `sources`, beside the weights of `base`, which engines read from the model's
    directory. The first sync to each engine verifies these base weights, whatever `sync.verify` says.

    sources: by name of the run's adapter, "" for the only one; the rest as in EngineSync
    """

    def __init__(
        self,
        sources: Mapping[str, AdapterSource],
        base: WeightSource,
        urls: Sequence[str],
        sync: SyncConfig,
        engine_tensor: int = 1,
        *,
        access: Access = OPEN,
        guard: Guard | None = None,
    ) -> None:
        super().__init__(base, urls, sync, engine_tensor, access=access, guard=guard)
        self._sources = dict(sources)
        self._run = self._agreement.on_main("naming the run's adapters", lambda: secrets.token_hex(4))
        self._syncs = 0
        self._base: Mapping[Key, str] | None = None  # hashes of the base parameters
        self._verified_base: set[str] = set()  # addresses of engines whose base weights are verified

    def _update_weights(self, verify: bool, again: bool, started: float) -> SyncReport:
        try:
            return self._sync_adapter(verify, again, started)
        except SyncError:  # an engine may be replaced afterwards
            self._verified_base.clear()
            raise

    def _sync_adapter(self, verify: bool, again: bool, started: float) -> SyncReport:
        self._syncs += not again
        prefix = f"{OURS}{self._run}-{self._syncs}"
        names = {own: f"{prefix}-{own}" if own else prefix for own in self._sources}
        self._on_rank_0("asking the engines", self._check_guard)
        self._prove_base()
        began = time.monotonic()
        parts = self._agreement.collect(self._at("gathering the adapters"), self._host_streams())
        gather_s, began = time.monotonic() - began, time.monotonic()
        self._on_rank_0("loading the adapter", lambda: self._load(names, parts, again, verify))
        self._on_rank_0("finishing the update", lambda: self._settle(self._version))
        metas = [meta for source in self._sources.values() for meta in source.exporter.metas()]
        size = sum(meta.nbytes for meta in metas)
        engine_s, sent = time.monotonic() - began, size * len(self._engines.clients)
        return SyncReport(
            seconds=time.monotonic() - started,
            bytes=size,
            tensors=len(metas),
            verified=len(metas) if verify else 0,
            transport=TRANSPORT,
            hops=HopCosts(gather_s=gather_s, engine_s=engine_s, engine_bytes=sent),
            adapters=names,
        )

    def _forget(self, client: EngineClient) -> None:
        self._verified_base.discard(client.url)

    def _prove_base(self) -> None:
        """Verifies the base weights of new engines."""
        unseen = {client.url for client in self._engines.clients} - self._verified_base
        if not unseen:
            return
        verifier = self._get_verifier()
        if self._base is None:
            hasher = verifier.hasher(self._rank)
            for name, tensor in self._proved.stream():
                hasher.add(name, tensor)
            self._base = self._expected(verifier, hasher)
        self._verify(verifier, self._base)
        self._verified_base |= unseen

    def _host_streams(self) -> dict[str, dict[str, Tensor]]:
        """Returns the tensors that this rank sends, by adapter."""
        return {
            own: {name: tensor.cpu().clone() for name, tensor in source.exporter.stream()}
            for own, source in self._sources.items()
        }

    def _load(
        self, names: Mapping[str, str], parts: Sequence[Mapping[str, Mapping[str, Tensor]]], again: bool, verify: bool
    ) -> None:
        """Loads the adapters into every engine, and unloads the former ones, on rank 0."""
        loads = []
        for own, source in self._sources.items():
            tensors = source.tensors([part[own] for part in parts])
            sums = {key: _sha256(tensor) for key, tensor in tensors.items()} if verify else None
            config = peft_config("base", source.exporter.arch, "policy", source.lora)
            loads.append((names[own], config, [pickle_by_name(tensors)] * self._engines.tensor, sums))

        def load(client: EngineClient) -> None:
            held: Sequence[str] = ()
            for name, config, payloads, sums in loads:
                if again:
                    with contextlib.suppress(EngineError):  # it is loaded only if an earlier attempt failed
                        client.unload_adapter(name)
                held = client.load_adapter(name, config, payloads, sums)
            for former in held:
                if former.startswith(OURS) and former not in names.values():
                    client.unload_adapter(former)

        self._engines.call(load)


def missing_adapters(arch: ModelArch, lora: LoRA, like: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Returns (name, zeros) of the adapters that are missing beside others of the same fused layer: with q_proj alone
    SGLang would look for v_proj's. like: some tensors of their dtype; shapes [r, in] and [out, r].
    """
    dtype = next(iter(like.values())).dtype
    found = []
    for _, row in adapted_rows(arch):
        takes = [lora.adapts(layer_of(hf)) for hf in row.hf]
        for hf, (rows, columns), has in zip(row.hf, row.shapes, takes, strict=True):
            if any(takes) and not has:
                for half, shape in (("A", (lora.rank, columns)), ("B", (rows, lora.rank))):
                    found.append((f"{layer_of(hf)}.lora_{half}.weight", torch.zeros(shape, dtype=dtype)))
    return found


def _sha256(tensor: Tensor) -> str:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(platform.host_bytes(raw)).hexdigest()
