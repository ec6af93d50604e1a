"""Triton's kernels are compiled for a GPU, without one, as `make test-triton` asks: its interpreter takes more."""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs triton, without its interpreter: make test-triton", allow_module_level=True)

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mrl.kernels import algo_triton, head_rows_triton  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
F, H, D, BITS, INT, LONG = "*fp32", "*bf16", "*fp64", "*i8", "i32", "i64"
KERNELS = {
    "sums": (head_rows_triton._sums, [F, LONG, INT, "fp32", F, D, INT], {"columns": 4096}),
    "gradient": (
        head_rows_triton._gradient,
        [F, LONG, INT, "fp32", F, F, F, F, F, "*i64", F, H, LONG],
        {"has_entropy": True, "columns": 4096},
    ),
    "gae": (algo_triton._gae, [F, F, BITS, "fp32", "fp32", F, F, D, INT], {"columns": 1024}),
    "whiten": (algo_triton._whiten, [F, BITS, D, "fp32", INT], {"shifts": False, "columns": 1024}),
    "clipped loss": (algo_triton._clipped_loss, [*[F] * 6, D, INT, INT, *["fp32"] * 4], {"columns": 1024}),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles(name: str) -> None:
    kernel, types, constants = KERNELS[name]
    signature = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(constants)], strict=True))
    made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=HOPPER)
    assert made.asm["cubin"]
