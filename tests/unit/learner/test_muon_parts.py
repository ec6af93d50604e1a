"""The Newton-Schulz iterations of Muon, against singular values and torch."""

from __future__ import annotations

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from mrl.learner.muon import COEFFICIENTS, EPS, orthogonalized


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (1, 5)])
@pytest.mark.parametrize("iterations", [1, 5])
def test_singular_values_alone_change_and_end_near_one(shape: tuple[int, int], iterations: int) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s, (a, b, c) = s / s.norm(), COEFFICIENTS
    for _ in range(iterations):
        s = a * s + b * s**3 + c * s**5
    want = u * s @ v
    assert torch.allclose(orthogonalized(matrix, iterations, torch.float64), want, atol=1e-12)
    assert torch.allclose(orthogonalized(matrix.float(), iterations).double(), want, atol=1e-5)
    assert iterations == 1 or (0.6 < s).all() and (s < 1.3).all()


def test_in_bfloat16_it_is_torch_s_up_to_rounding() -> None:
    matrix = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    torchs = _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, EPS).float()
    ours = orthogonalized(matrix, 5, torch.bfloat16)
    assert ours.dtype == torch.float32 and float((ours - torchs).norm() / torchs.norm()) < 0.05


def test_a_matrix_without_a_gradient_is_not_moved() -> None:
    assert torch.equal(orthogonalized(torch.zeros(3, 4), 5), torch.zeros(3, 4))
