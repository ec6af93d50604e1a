"""Losses, gradients and held-out metrics of supervised fine-tuning are the same under every layout and for any number
of micro-batches: with tokens of weight zero, label smoothing, dynamic fine-tuning and NEFTune."""

from __future__ import annotations

import json

import pytest
import torch

from mrl.models.batch import ModelBatch, PassOptions
from mrl.models.noise import embedding_noise
from tests.helpers.slow import slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world

MICRO_BATCHES = {"one": 1, "one/40/full": 4, **dict(slow_cases(("one/60", 2)))}
TWO = ("cp2/40", "pp2", *slow_cases("tp2", "dp2", "tp2/40/full"))
Results = dict[str, dict[str, tuple[float, float, str, int, float]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("imitation")
    size = {"num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 313}
    model, found = make_tiny(root / "model", "qwen2", tied=True, weights=False, **size), {}
    for processes, layouts in ((1, tuple(MICRO_BATCHES)), (2, TWO)):
        result = root / f"{processes}.json"
        run_world(processes, "imitation.py", model, root / "one.pt", result, *layouts)
        found |= json.loads(result.read_text())
    return found


@pytest.mark.parametrize("layout", [*MICRO_BATCHES, *TWO])
def test_loss_and_gradients_equal_one_process(results: Results, layout: str) -> None:
    assert {"nll", "dft", "smoothed", "noise", "all", "validation/loss", "validation/token_accuracy/b"} <= set(
        results[layout]
    )
    for case, (loss_error, gradient_error, worst, _, _) in results[layout].items():
        assert loss_error < 1e-5 and gradient_error < 1e-5, (case, loss_error, gradient_error, worst)


def test_each_loss_is_one_of_its_own(results: Results) -> None:
    of = {case: value for case, (_, _, _, _, value) in results["one"].items()}
    assert len({of[case] for case in ("nll", "dft", "smoothed", "noise", "other noise", "all")}) == 6
    assert of["nll"] == pytest.approx(of["validation/loss"], rel=1e-6)
    assert {layout: results[layout]["nll"][3] for layout in MICRO_BATCHES} == MICRO_BATCHES


def noise(tokens: list[int], samples: list[int], alpha: float = 1.0, seed: int = 5, h: int = 64) -> torch.Tensor:
    lens = torch.tensor(tokens)
    batch = ModelBatch(
        extras=PassOptions(noise=alpha, seed=seed), samples=torch.tensor(samples), seq_lens=lens,
        starts=torch.cat([lens.new_zeros(1), lens.cumsum(0)]), positions=torch.cat([torch.arange(n) for n in tokens]),
    )  # fmt: skip
    return embedding_noise(batch, torch.zeros(1, 1, h), (0, 1))[:, 0]


def test_the_noise_is_uniform_and_of_the_row_s_own_length() -> None:
    made = noise([400, 25], [0, 1], alpha=5.0) / 5
    for part, length in ((made[:400], 400), (made[400:], 25)):
        unit = part * (length * 64) ** 0.5
        assert -1 <= float(unit.min()) < -0.99 and 0.99 < float(unit.max()) <= 1
        assert abs(float(unit.mean())) < 0.05 and float(unit.var()) == pytest.approx(1 / 3, rel=0.05)
    whole = made[:400] * (400 * 64) ** 0.5
    assert whole.unique().numel() > 0.99 * whole.numel()
    neighbours = torch.corrcoef(torch.stack([whole[:-1].flatten(), whole[1:].flatten()]))[0, 1]
    assert abs(float(neighbours)) < 0.02


def test_the_noise_of_a_sample_does_not_depend_on_what_is_beside_it() -> None:
    assert torch.equal(noise([9, 4, 7], [2, 0, 1])[9:13], noise([4], [0]))
    assert not torch.equal(noise([4], [0]), noise([4], [1])) and not torch.equal(
        noise([4], [0]), noise([4], [0], seed=6)
    )
