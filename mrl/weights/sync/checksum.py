"""The engine's own parameter hashes, computed on the trainer while the tensors are streamed.

SGLang hashes each parameter of each of its processes: on CPU the first 8 bytes of SHA-256 over its bytes, on a GPU a
sum of mixed 32-bit words (`TileHash`). Both are updated part by part here; only parts that arrive out of order or on
several ranks are buffered.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrl import platform
from mrl.weights.sync.engine_params import EngineParam

Key = tuple[int, str]  # the engine's tensor-parallel rank, the engine's parameter name
_M32 = 0xFFFFFFFF


class ParamHash(ABC):
    """Hash of one engine parameter. Parts may be added on several ranks; `merge` combines their states."""

    def __init__(self, param: EngineParam) -> None:
        self.param = param
        sizes = [part.nbytes for part in param.parts]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]

    @abstractmethod
    def add(self, index: int, part: Tensor) -> None:
        """Adds part number `index`, already cut; of any shape, since only its bytes count."""

    @abstractmethod
    def state(self) -> Any:
        """Returns the state that another rank needs to continue; only for parameters whose parts are on several
        ranks.
        """

    @abstractmethod
    def merge(self, state: Any) -> None:
        """Merges another rank's `state`."""

    @abstractmethod
    def hexdigest(self) -> str:
        """Returns 16 hex digits, as the engine formats them. Every part must have been added."""


class Sha256Hash(ParamHash):
    """SHA-256 of a parameter. Parts that arrive early are buffered; so are all parts but the first rank's if several
    ranks have some.
    """

    def __init__(self, param: EngineParam) -> None:
        super().__init__(param)
        self._hash = hashlib.sha256()
        self._next = 0
        self._waiting: dict[int, Tensor] = {}

    def add(self, index: int, part: Tensor) -> None:
        if index != self._next:
            self._waiting[index] = _bytes(part).cpu().clone()
            return
        self._update(_bytes(part).cpu())
        while self._next in self._waiting:
            self._update(self._waiting.pop(self._next))

    def _update(self, raw: Tensor) -> None:
        self._hash.update(platform.host_bytes(raw))
        self._next += 1

    def state(self) -> dict[int, Tensor]:
        """Returns the bytes, uint8 [n], of the parts that still wait for an earlier one, by part number."""
        return self._waiting

    def merge(self, state: Mapping[int, Tensor]) -> None:
        """Adds the parts of another rank: uint8 [n] each, by number."""
        for index in sorted(state):
            self.add(index, state[index])

    def hexdigest(self) -> str:
        assert self._next == len(self.param.parts), f"{self.param.name}: part {self._next} never came"
        self._hash.update(bytes(self.param.padding))
        return self._hash.hexdigest()[:16]


class TileHash(ParamHash):
    """The hash of SGLang's GPU kernel (sglang/kernels/ops/memory/gpu_tensor_hash.py), in plain torch.

    Each 32-bit word is mixed with its position twice and summed over tiles of 8,192 words, so parts can be added in
    any order and on any rank. Arithmetic is modulo 2^32, in int64.
    """

    TILE = 8192
    CHUNK = 1 << 22  # words mixed at once; bounds the int64 temporaries
    SEED = 0x243F6A88
    SEEDS = (SEED, (SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _M32)
    POSITION = ((0x27D4EB2D, 15), (0x165667B1, 13))

    def __init__(self, param: EngineParam) -> None:
        super().__init__(param)
        self._words = -(-param.nbytes // 4)
        self._sums: Tensor | None = None  # [2, tiles] int64

    def add(self, index: int, part: Tensor) -> None:
        self._add_words(self.offsets[index], _bytes(part))

    def _add_words(self, offset: int, raw: Tensor) -> None:
        if offset % 4 or raw.numel() % 4:
            raise ValueError(f"{self.param.name}: a part is not aligned to 4 bytes, so it cannot be hashed in parts")
        words = raw.view(torch.int32)
        for start in range(0, words.numel(), self.CHUNK):
            chunk = words[start : start + self.CHUNK].to(torch.int64) & _M32
            self._mix(torch.arange(chunk.numel(), device=chunk.device) + (offset // 4 + start), chunk)

    def _mix(self, position: Tensor, word: Tensor) -> None:
        if self._sums is None:
            tiles = -(-self._words // self.TILE)
            self._sums = torch.zeros(2, tiles, dtype=torch.int64, device=word.device)
        tile = position // self.TILE
        for sums, seed, (factor, turn) in zip(self._sums, self.SEEDS, self.POSITION, strict=True):
            at = (position * factor + seed & _M32) ^ _rotate(position, turn)
            sums.index_add_(0, tile, _fmix(word ^ at))
        self._sums &= _M32

    def state(self) -> Tensor | None:
        """Returns the sums of this rank's words, int64 [2, tiles] on the CPU; None if it has seen no part."""
        return None if self._sums is None else self._sums.cpu()

    def merge(self, state: Tensor | None) -> None:
        """Adds another rank's sums, int64 [2, tiles]."""
        if state is not None:
            self._sums = state if self._sums is None else (self._sums.cpu() + state) & _M32

    def hexdigest(self) -> str:
        if self.param.padding:
            device = "cpu" if self._sums is None else self._sums.device
            zeros = torch.zeros(self.param.padding, dtype=torch.uint8, device=device)
            self._add_words(self.param.nbytes - self.param.padding, zeros)
        assert self._sums is not None
        high, low = (_fmix(sums ^ (self._words * 4 & _M32)).tolist() for sums in self._sums)
        total = sum((h << 32) + x for h, x in zip(high, low, strict=True))
        return f"{_splitmix(total):016x}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _rotate(x: Tensor, turn: int) -> Tensor:
    return (x << turn | x >> 32 - turn) & _M32


def _fmix(x: Tensor) -> Tensor:
    x = x ^ x >> 16
    x = x * 0x85EBCA6B & _M32
    x = x ^ x >> 13
    x = x * 0xC2B2AE35 & _M32
    return x ^ x >> 16


def _splitmix(x: int) -> int:
    mask = (1 << 64) - 1
    x &= mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


class StreamHasher:
    """Hashes of all parameters of an engine, updated with this rank's part of the export stream."""

    def __init__(
        self, params: Mapping[Key, EngineParam], senders: Mapping[str, int], rank: int, kind: type[ParamHash]
    ) -> None:
        """Prepares the hashes. senders: the world rank that streams each HF tensor. The rank that streams a parameter's
        first part owns its hash.
        """
        self._params, self._senders, self._rank = params, senders, rank
        self._hashes: dict[Key, ParamHash] = {}
        self._uses: dict[str, list[tuple[Key, int]]] = {}
        for key, param in params.items():
            if rank in self._holders(param):
                self._hashes[key] = kind(param)
            for index, part in enumerate(param.parts):
                if senders[part.name] == rank:
                    self._uses.setdefault(part.name, []).append((key, index))

    def _holders(self, param: EngineParam) -> list[int]:
        """Returns the ranks that stream parts of a parameter, in order of the parts; the first one owns its hash."""
        return list(dict.fromkeys(self._senders[source] for source in param.sources))

    def add(self, name: str, tensor: Tensor) -> None:
        """Hashes the exported tensor `name`, of its full shape, into every engine parameter that has a part of it."""
        for key, index in self._uses.get(name, ()):
            hashing = self._hashes[key]
            hashing.add(index, hashing.param.parts[index].cut(tensor))

    def shared(self) -> list[tuple[Key, list[int]]]:
        """Returns the parameters with parts on several ranks, and these ranks: the same list everywhere. Merge before
        `digests`.
        """
        found = ((key, self._holders(param)) for key, param in self._params.items())
        return [(key, holders) for key, holders in found if len(holders) > 1]

    def state(self, key: Key) -> Any:
        return self._hashes[key].state()

    def merge(self, key: Key, state: Any) -> None:
        self._hashes[key].merge(state)

    def digests(self) -> dict[Key, str]:
        """Returns the digests of the parameters that this rank owns."""
        return {
            key: hashing.hexdigest()
            for key, hashing in self._hashes.items()
            if self._holders(hashing.param)[0] == self._rank
        }


@dataclass(frozen=True)
class Mismatch:
    engine: str
    rank: int
    param: str
    sources: tuple[str, ...]
    trainer: str
    held: str

    def __str__(self) -> str:
        where = f"engine {self.engine}" + (f" rank {self.rank}" if self.rank else "")
        made_of = "" if self.sources == (self.param,) else f" (made of {_brief(self.sources)})"
        return f"{self.param}{made_of}: trainer {self.trainer}, {where} {self.held}"


def _brief(names: Sequence[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} ... {names[-1]}, {len(names)} tensors"
