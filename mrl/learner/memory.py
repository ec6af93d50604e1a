"""What of a model is on the device: its parameters, and what only updates need.

The moves are local; that all ranks make them at the same point is for the caller to see to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from torch import Tensor, UntypedStorage

from mrl import platform
from mrl.learner.optimizer import prime
from mrl.models.fp8_params import is_quantized, values_of

Offload = Literal["none", "optimizer", "all"]
Level = Literal["nothing", "parameters", "all"]
LEVELS: tuple[Level, ...] = ("nothing", "parameters", "all")


class GivenUpError(RuntimeError):
    """Something that must be on the device has been given up, and nobody has brought it back."""


class LearnerMemory:
    """Of one model: which of its storages wait in host memory.

    level: what the run wants on the device, at first all. How much of the rest is really given up says `offload`: the
    optimizer's (gradients, which come back as zeros; main weights; Adam's moments), or the parameters too
    bytes_copied: so far, either way
    """

    def __init__(
        self, model: str, offload: Offload, parameters: Iterable[Tensor], chunks: list[Any], optimizer: Any
    ) -> None:
        """chunks: Megatron's DDP; optimizer: what takes their gradients, None for a model that is not trained"""
        self.model, self.offload = model, offload
        self.level: Level = "all"
        self.bytes_copied = 0
        self._parameters, self._chunks, self._optimizer = list(parameters), chunks, optimizer
        self._rooms = {"optimizer": platform.HostRoom(), "parameters": platform.HostRoom()}
        self._gradients: list[tuple[UntypedStorage, int]] = []  # that are given up, and their sizes
        self._unchanged = False  # the parameters, since they came from host memory
        if optimizer is not None:
            prime(optimizer)  # Adam's moments exist from now on: what is moved, or left for an engine, is the same

    def moves(self, level: Level) -> bool:
        """Whether `move` to it would change anything."""
        return self._to_be_away(level) != self._away

    def give_up(self, level: Level) -> None:
        """What `level` does not need. Raises RuntimeError, and that part is still there, if the host has no room."""
        new = self._to_be_away(level) - self._away
        if "optimizer" in new:
            self.bytes_copied += self._rooms["optimizer"].take(self._optimizer_storages())
            self._gradients = [(storage, storage.nbytes()) for storage in _once(self._gradient_buffers())]
            for storage, _ in self._gradients:
                storage.resize_(0)
        if "parameters" in new:
            room = self._rooms["parameters"]
            self.bytes_copied += room.take(_once(self._parameters), same=self._unchanged)
        self.level = min(self.level, level, key=LEVELS.index)

    def bring(self, level: Level) -> None:
        """What `level` needs. Raises RuntimeError, and that part is still away, if the device has no room."""
        back = self._away - self._to_be_away(level)
        if "parameters" in back:
            self.bytes_copied += self._rooms["parameters"].give_back()
            self._unchanged = True
        if "optimizer" in back:
            self._bring_optimizer()
        if level == "all":
            self._unchanged = False
        self.level = max(self.level, level, key=LEVELS.index)

    def _bring_optimizer(self) -> None:
        try:
            for storage, size in self._gradients:
                storage.resize_(size)
            self.bytes_copied += self._rooms["optimizer"].give_back()
        except BaseException:
            for storage, _ in self._gradients:
                storage.resize_(0)
            raise
        self._gradients = []
        for gradients in self._gradient_buffers():
            gradients.zero_()

    def move(self, level: Level) -> Level:
        """To this level; what it was before."""
        before = self.level
        self.give_up(level)
        self.bring(level)
        return before

    def changed(self) -> None:
        """To be called by who writes into the parameters at a level below "all"."""
        self._unchanged = False

    def require(self, level: Level, doing: str) -> None:
        """Raises GivenUpError if something that `doing` needs is away."""
        if missing := self._away - self._to_be_away(level):
            what = {"parameters": "parameters", "optimizer": "gradients, main weights and Adam's moments"}
            names = " and ".join(what[name] for name in sorted(missing))
            raise GivenUpError(
                f"{doing}: the {self.model}'s {names} are not on the device: they were given up "
                f"(offload: {self.offload}), and nothing has brought them back"
            )

    def read(self, tensor: Tensor) -> Tensor:
        """A parameter, a main weight or a moment of the model where its bytes are: in host memory while it is away,
        else the tensor itself; of a parameter in fp8 what it stands for, in its nominal dtype."""
        for room in self._rooms.values():
            if (found := room.read(tensor)) is not None:
                return found
        return values_of(tensor) if is_quantized(tensor) else tensor

    @property
    def _away(self) -> set[str]:
        return {name for name, room in self._rooms.items() if room.is_away}

    def _to_be_away(self, level: Level) -> set[str]:
        away = set()
        if self._optimizer is not None and self.offload != "none" and level != "all":
            away.add("optimizer")
        if self.offload == "all" and level == "nothing":
            away.add("parameters")
        return away

    def _optimizer_storages(self) -> list[UntypedStorage]:
        """Of main weights, where they are not the parameters themselves, and of moments."""
        parameters = {storage._cdata for storage in _once(self._parameters)}
        return [storage for storage in _once(_optimizer_tensors(self._optimizer)) if storage._cdata not in parameters]

    def _gradient_buffers(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Counters apart, which are numbers on the host or single ones."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                yield main
                yield from (x for x in part.optimizer.state[main].values() if isinstance(x, Tensor) and x.dim() > 0)


def _once(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The storages that lie below them, in order."""
    return list({storage._cdata: storage for storage in map(Tensor.untyped_storage, tensors)}.values())
