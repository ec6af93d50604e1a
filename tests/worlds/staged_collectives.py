"""Run with 2 processes: collectives staged through host memory against plain ones. Prints {function: [equal, copies]}
of rank 0: whether all ranks have the same bits as without staging, and how many tensors were copied to host memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl import platform

platform.install()

from mrl.parallel import rank  # noqa: E402
from tools.gpu import staged_collectives  # noqa: E402

N = 1000


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (100 * torch.randn(*shape, generator=torch.Generator().manual_seed(rank()))).to(dtype)


def all_reduce(dtype: torch.dtype, op: Any = dist.ReduceOp.SUM, async_op: bool = False) -> list[Tensor]:
    x = numbers(N, dtype=dtype)
    work = dist.all_reduce(x, op, async_op=async_op)
    if work is not None:
        work.wait()
    return [x]


def one_for_all(function: Callable[..., Any], **options: Any) -> list[Tensor]:
    x = numbers(N)
    function(x, **options)
    return [x] if function is not dist.reduce or rank() == 0 else []


def all_gather() -> list[Tensor]:
    parts = [torch.zeros(N) for _ in range(2)]
    dist.all_gather(parts, numbers(N))
    return parts


def gather_into_own() -> list[Tensor]:
    """The input is a part of the output, as in Megatron's optimizer."""
    whole = numbers(2 * N)
    dist.all_gather_into_tensor(whole, whole.chunk(2)[rank()])
    return [whole]


def scatter_into_own(dtype: torch.dtype) -> list[Tensor]:
    """The output is a part of the input, as in Megatron's buckets of gradients."""
    whole = numbers(2 * N, dtype=dtype)
    mine = whole.chunk(2)[rank()]
    dist.reduce_scatter_tensor(mine, whole)
    return [mine]


def reduce_scatter() -> list[Tensor]:
    mine = torch.zeros(N)
    dist.reduce_scatter(mine, list(numbers(2, N)))
    return [mine]


def all_to_all_single() -> list[Tensor]:
    sends, receives = ([300, 700], [300, 100]) if rank() == 0 else ([100, 900], [700, 900])
    found = torch.zeros(sum(receives))
    dist.all_to_all_single(found, numbers(N), receives, sends)
    return [found]


def gather_and_scatter() -> list[Tensor]:
    parts, mine = [torch.zeros(N) for _ in range(2)], torch.zeros(N)
    dist.gather(numbers(N), parts if rank() == 0 else None)
    dist.scatter(mine, parts if rank() == 0 else None)
    return [*parts, mine]


def send_and_receive() -> list[Tensor]:
    x = numbers(N)
    if rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    return [x]


def both_send_first() -> list[Tensor]:
    found, other = torch.zeros(N), 1 - rank()
    works = [dist.isend(numbers(N), other), dist.irecv(found, other)]
    for work in works:
        work.wait()  # type: ignore[union-attr]
    return [found]


def batch_of_sends() -> list[Tensor]:
    found, other = torch.zeros(N), 1 - rank()
    both = [dist.P2POp(dist.isend, numbers(N), other), dist.P2POp(dist.irecv, found, other)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return [found]


def coalesced(function: str) -> list[Tensor]:
    outputs = [numbers(N), numbers(2 * N)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in outputs:
            if function == "all_reduce":
                dist.all_reduce(x)
            elif function == "all_gather":
                dist.all_gather_into_tensor(x, x.chunk(2)[rank()])
            else:
                dist.reduce_scatter_tensor(x.chunk(2)[rank()], x)
    manager.wait()
    return [x.chunk(2)[rank()] for x in outputs] if function == "reduce_scatter" else outputs


def objects() -> list[Tensor]:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, numbers(N))
    return found


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def in_a_backward_pass() -> list[Tensor]:
    """In a thread that has set nothing, as autograd's are on CUDA."""
    x = numbers(N).requires_grad_()
    thread = threading.Thread(target=lambda: (Summed.apply(x) * numbers(N)).sum().backward())  # type: ignore[no-untyped-call]
    thread.start()
    thread.join()
    assert x.grad is not None
    return [x.grad]


FUNCTIONS: dict[str, Callable[[], list[Tensor]]] = {
    "all_reduce": lambda: all_reduce(torch.float32),
    "all_reduce, bfloat16": lambda: all_reduce(torch.bfloat16),
    "all_reduce, int64, max": lambda: all_reduce(torch.int64, dist.ReduceOp.MAX),
    "all_reduce, async_op": lambda: all_reduce(torch.float32, async_op=True),
    "broadcast": lambda: one_for_all(dist.broadcast, src=1),
    "reduce": lambda: one_for_all(dist.reduce, dst=0),
    "all_gather": all_gather,
    "all_gather_into_tensor": gather_into_own,
    "reduce_scatter_tensor": lambda: scatter_into_own(torch.float32),
    "reduce_scatter_tensor, bfloat16": lambda: scatter_into_own(torch.bfloat16),
    "reduce_scatter": reduce_scatter,
    "all_to_all_single": all_to_all_single,
    "gather, scatter": gather_and_scatter,
    "send, recv": send_and_receive,
    "isend, irecv": both_send_first,
    "batch_isend_irecv": batch_of_sends,
    "coalesced all_reduce": lambda: coalesced("all_reduce"),
    "coalesced all_gather": lambda: coalesced("all_gather"),
    "coalesced reduce_scatter": lambda: coalesced("reduce_scatter"),
    "all_gather_object": objects,
    "in a backward pass": in_a_backward_pass,
}


def main() -> None:
    platform.init_process_group(120, "gloo")
    plain = {name: function() for name, function in FUNCTIONS.items()}
    staged_collectives.install()
    copies, copy = [0], staged_collectives.to_host

    def counted(value: Any) -> Any:
        copies[0] += isinstance(value, Tensor)
        return copy(value)

    staged_collectives.to_host = counted
    found: dict[str, tuple[bool, int]] = {}
    for name, function in FUNCTIONS.items():
        copies[0] = 0
        result, want = function(), plain[name]
        same = len(result) == len(want) and all(map(torch.equal, result, want))
        found[name] = same, copies[0]
    dist.barrier()
    boxes: list[Any] = [None, None]
    dist.all_gather_object(boxes, found)
    if rank() == 0:
        merged = {name: [all(box[name][0] for box in boxes), min(box[name][1] for box in boxes)] for name in found}
        print(json.dumps(merged))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
