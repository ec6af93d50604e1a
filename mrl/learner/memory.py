"""Offload of a model: which of its parameters, gradients and optimizer states are on the device.

Moves are local; the caller makes all ranks move at the same point.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from torch import Tensor, UntypedStorage

from mrl import platform
from mrl.learner.optimizer import create_optimizer_state
from mrl.models.fp8_params import is_quantized, values_of

Offload = Literal["none", "optimizer", "all"]
Level = Literal["nothing", "parameters", "all"]
LEVELS: tuple[Level, ...] = ("nothing", "parameters", "all")


class OffloadedError(RuntimeError):
    """Required tensors are offloaded to host memory and have not been restored."""


class LearnerMemory:
    """Device residency of one model's storages.

    level: what the run wants on the device, initially all. `offload` decides what is really moved to the host: the
    optimizer's storages (gradients, which return as zeros; main weights; Adam's moments), or the parameters too
    bytes_copied: total so far, both directions
    """

    def __init__(
        self, model: str, offload: Offload, parameters: Iterable[Tensor], chunks: list[Any], optimizer: Any
    ) -> None:
        """chunks: Megatron's DDP modules; optimizer: the one that takes their gradients, None for an untrained
        model.
        """
        self.model, self.offload = model, offload
        self.level: Level = "all"
        self.bytes_copied = 0
        self._parameters, self._chunks, self._optimizer = list(parameters), chunks, optimizer
        self._rooms = {"optimizer": platform.OffloadBuffer(), "parameters": platform.OffloadBuffer()}
        self._gradients: list[tuple[UntypedStorage, int]] = []  # offloaded ones and their sizes
        self._unchanged = False  # True if the parameters equal their host copy
        if optimizer is not None:
            create_optimizer_state(optimizer)  # now, so that the memory to move, or left for an engine, stays constant

    def moves(self, level: Level) -> bool:
        """Returns True if `move` to `level` would change anything."""
        return self._to_be_away(level) != self._away

    def offload_to(self, level: Level) -> None:
        """Offloads everything that `level` does not need.

        If the host lacks memory, raises RuntimeError and keeps that part on the device.
        """
        new = self._to_be_away(level) - self._away
        if "optimizer" in new:
            self.bytes_copied += self._rooms["optimizer"].offload(self._optimizer_storages())
            self._gradients = [(storage, storage.nbytes()) for storage in _once(self._gradient_buffers())]
            for storage, _ in self._gradients:
                storage.resize_(0)
        if "parameters" in new:
            room = self._rooms["parameters"]
            self.bytes_copied += room.offload(_once(self._parameters), same=self._unchanged)
        self.level = min(self.level, level, key=LEVELS.index)

    def reload_to(self, level: Level) -> None:
        """Restores everything that `level` needs.

        If the device lacks memory, raises RuntimeError and leaves that part on the host.
        """
        back = self._away - self._to_be_away(level)
        if "parameters" in back:
            self.bytes_copied += self._rooms["parameters"].reload()
            self._unchanged = True
        if "optimizer" in back:
            self._reload_optimizer()
        if level == "all":
            self._unchanged = False
        self.level = max(self.level, level, key=LEVELS.index)

    def _reload_optimizer(self) -> None:
        try:
            for storage, size in self._gradients:
                storage.resize_(size)
            self.bytes_copied += self._rooms["optimizer"].reload()
        except BaseException:
            for storage, _ in self._gradients:
                storage.resize_(0)
            raise
        self._gradients = []
        for gradients in self._gradient_buffers():
            gradients.zero_()

    def move(self, level: Level) -> Level:
        """Moves to `level`; returns the previous level."""
        before = self.level
        self.offload_to(level)
        self.reload_to(level)
        return before

    def changed(self) -> None:
        """Marks the parameters as changed; call it after writing into them at a level below "all"."""
        self._unchanged = False

    def require(self, level: Level, doing: str) -> None:
        """Raises OffloadedError if a part that `doing` needs is offloaded."""
        if missing := self._away - self._to_be_away(level):
            what = {"parameters": "parameters", "optimizer": "gradients, main weights and Adam's moments"}
            names = " and ".join(what[name] for name in sorted(missing))
            raise OffloadedError(
                f"{doing}: the {self.model}'s {names} are not on the device: they were offloaded "
                f"(offload: {self.offload}) and not reloaded"
            )

    def read(self, tensor: Tensor) -> Tensor:
        """Returns a parameter, main weight or moment where its bytes are: the host copy while offloaded, else the
        tensor itself.

        An fp8 parameter is returned dequantized, in its nominal dtype.
        """
        for room in self._rooms.values():
            if (found := room.host_view(tensor)) is not None:
                return found
        return values_of(tensor) if is_quantized(tensor) else tensor

    @property
    def _away(self) -> set[str]:
        return {name for name, room in self._rooms.items() if room.is_offloaded}

    def _to_be_away(self, level: Level) -> set[str]:
        away = set()
        if self._optimizer is not None and self.offload != "none" and level != "all":
            away.add("optimizer")
        if self.offload == "all" and level == "nothing":
            away.add("parameters")
        return away

    def _optimizer_storages(self) -> list[UntypedStorage]:
        """Storages of moments, and of main weights that are not the parameters themselves."""
        parameters = {storage._cdata for storage in _once(self._parameters)}
        return [storage for storage in _once(_optimizer_tensors(self._optimizer)) if storage._cdata not in parameters]

    def _gradient_buffers(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yields main weights and moments, without counters."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                yield main
                yield from (x for x in part.optimizer.state[main].values() if isinstance(x, Tensor) and x.dim() > 0)


def _once(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Returns the distinct storages of the tensors, in order."""
    return list({storage._cdata: storage for storage in map(Tensor.untyped_storage, tensors)}.values())
