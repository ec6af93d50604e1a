"""Broadcast of a message from rank 0; tensors in it are sent raw, without pickling or copies."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PIECE = 256 << 20  # bytes sent at once: the group's time-out applies to each piece


class _Pickler(pickle.Pickler):
    """Pickler that leaves out tensors in host memory."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor or value.device.type != "cpu" or value.requires_grad:
            return None
        self.tensors.append(value.contiguous())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: Any) -> Tensor:
        return self._tensors[place]


def send(message: object, group: dist.ProcessGroup) -> None:
    """Sends `message` from rank 0 while all other ranks `receive`; collective over `group`, which holds all ranks,
    on gloo.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(message)
    forms = [(tuple(tensor.shape), tensor.dtype) for tensor in pickler.tensors]
    dist.broadcast_object_list([(file.getvalue(), forms)], src=0, group=group)
    _broadcast(pickler.tensors, group)


def receive(group: dist.ProcessGroup) -> Any:
    """Returns the message that rank 0 sends."""
    box: list[Any] = [None]
    dist.broadcast_object_list(box, src=0, group=group)
    pickled, forms = box[0]
    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in forms]
    _broadcast(tensors, group)
    return _Unpickler(io.BytesIO(pickled), tensors).load()


def _broadcast(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    for tensor in tensors:
        for piece in tensor.view(-1).view(torch.uint8).split(PIECE):
            dist.broadcast(piece, src=0, group=group)
