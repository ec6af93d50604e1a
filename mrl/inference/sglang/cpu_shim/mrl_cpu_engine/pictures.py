"""Requests with pictures on their way through the engine's processes, without what costs more than the pictures."""

from __future__ import annotations

import copyreg
import io
import pickle
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

KEPT_PROMPTS = 1024
AS_ARRAYS = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)


def send_arrays(module: ModuleType) -> None:
    """torch pickles a tensor as a file of its own, which takes a millisecond to write and read. A request with a
    picture has four."""
    stock = module.sock_send

    def sock_send(socket: Any, obj: Any, flags: int = 0) -> None:
        if module._USE_PICKLE_IPC:
            socket.send(dumps(obj), flags=flags)
        else:
            stock(socket, obj, flags)

    vars(module)["sock_send"] = sock_send


def dumps(obj: Any) -> bytes:
    """Returns bytes from which `pickle.loads` makes `obj`; ordinary tensors in memory travel as numpy arrays."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: _reduced}
    pickler.dump(obj)
    return buffer.getvalue()


def _reduced(tensor: Any) -> Any:
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad
    if is_plain and tensor.dtype in AS_ARRAYS:
        return torch.from_numpy, (tensor.numpy(),)
    return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def keep_templates(module: ModuleType) -> None:
    """sglang keeps the positions of a prompt with pictures of some sizes where prompts are texts. Ours are token ids,
    the same for all samples of a prompt."""
    processor = module.QwenVLImageProcessor
    stock = processor._build_image_prompt_template

    @lru_cache(maxsize=KEPT_PROMPTS)
    def kept(self: Any, ids: tuple[int, ...], grids: tuple[Any, ...]) -> Any:
        return stock(self, [*ids], grids)

    def build(self: Any, prompt: Any, grids: tuple[Any, ...]) -> Any:
        return stock(self, prompt, grids) if isinstance(prompt, str) else kept(self, tuple(prompt), grids)

    processor._build_image_prompt_template = build
