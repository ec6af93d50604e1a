"""How many rows of logits the loss head works on at once. Without torch: the plan counts by the same rule."""

from __future__ import annotations

_ROWS = 256  # at least, on a CPU: enough for matrix products at full speed
_ROWS_GPU = 1024
_MULTIPLE = 128  # of rows: no block of fp8 is cut by a chunk's end
_ELEMENTS = 1 << 21  # of logits, on a CPU. More rows a chunk while they are few
_ELEMENTS_GPU = 1 << 27  # half a GiB a float32 block: fewer, longer kernels
_WAITING_GPU = 1 << 30  # bytes of the logits' gradients that wait for their products
_FLOAT32 = 4

BLOCK = 1 << 17  # elements that several operations go over, one after the other: half a MiB stays in a core's cache
BLOCK_GPU = 1 << 23


def chunk_rows(columns: int, itemsize: int, *, on_gpu: bool) -> int:
    """So many that on a CPU a chunk of narrow elements is as large as one of fewer in float32. columns: words of the
    vocabulary on this rank; itemsize: bytes of a logit"""
    if on_gpu:
        least, elements = _ROWS_GPU, _ELEMENTS_GPU
    else:
        least, elements = (max(1, 4 // itemsize) * count for count in (_ROWS, _ELEMENTS))
    return max(least, elements // columns // _MULTIPLE * _MULTIPLE)


def waiting_rows(rows: int, columns: int, hidden: int, itemsize: int, chunk: int) -> int:
    """Of how many rows a GPU multiplies the logits' gradients at once, some chunks' or those of all. Each product adds
    to the gradient of the vocabulary's matrix, which takes as long as 1,000 rows' arithmetic. itemsize: bytes of such a
    gradient; hidden: columns of the matrix. All together need no sum in float32, whose bytes they may take instead."""
    a_row = columns * itemsize
    if rows * a_row <= max(_WAITING_GPU, columns * hidden * _FLOAT32):
        return rows
    return min(rows, max(chunk, _WAITING_GPU // a_row // chunk * chunk))
