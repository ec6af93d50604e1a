"""Chunk sizes of the loss head's logits. Without torch: the planner uses the same rule."""

from __future__ import annotations

_ROWS = 256  # at least, on a CPU: enough for matrix products at full speed
_ROWS_GPU = 1024
_MULTIPLE = 128  # of rows, so that chunks end at fp8 blocks
_ELEMENTS = 1 << 21  # of logits, on a CPU. More rows a chunk while they are few
_ELEMENTS_GPU = 1 << 27  # half a GiB a float32 block: fewer, longer kernels
_WAITING_GPU = 1 << 30  # bytes of buffered gradients of the logits
_FLOAT32 = 4

BLOCK = 1 << 17  # elements per group of operations: half a MiB stays in a core's cache
BLOCK_GPU = 1 << 23


def chunk_rows(columns: int, itemsize: int, *, on_gpu: bool) -> int:
    """Returns the rows per chunk; on a CPU a chunk has as many bytes for narrow elements as for float32.

    columns: vocabulary entries on this rank; itemsize: bytes of a logit
    """
    if on_gpu:
        least, elements = _ROWS_GPU, _ELEMENTS_GPU
    else:
        least, elements = (max(1, 4 // itemsize) * count for count in (_ROWS, _ELEMENTS))
    return max(least, elements // columns // _MULTIPLE * _MULTIPLE)


def waiting_rows(rows: int, columns: int, hidden: int, itemsize: int, chunk: int) -> int:
    """Returns the number of rows whose logit gradients a GPU multiplies at once: some chunks' or all.

    Each product adds to the gradient of the lm_head weight, which takes as long as the arithmetic of 1,000 rows.
    itemsize: bytes of such a gradient; hidden: columns of the weight. With all rows at once no float32 sum is needed,
    and its bytes are available instead.
    """
    a_row = columns * itemsize
    if rows * a_row <= max(_WAITING_GPU, columns * hidden * _FLOAT32):
        return rows
    return min(rows, max(chunk, _WAITING_GPU // a_row // chunk * chunk))
