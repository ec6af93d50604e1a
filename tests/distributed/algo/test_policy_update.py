"""Corrections for the engine's policy and trust regions in updates of the actor, with samples split over two ranks."""

from __future__ import annotations

import json
import math

import pytest

from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world

Results = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("policy_update")
    model = make_tiny(root / "model", "llama", tied=True, weights=False)
    run_world(2, "policy_update.py", model, root / "result.json", "cp2")
    return json.loads((root / "result.json").read_text())


@pytest.mark.parametrize(("case", "factor"), [("weights 1.5", 1.5), ("weights cut to 2", 2.0)])
def test_importance_weights_multiply_the_loss_and_its_gradient(results: Results, case: str, factor: float) -> None:
    for name in ("actor/pg_loss", "grad_norm"):
        assert results[case][name] == pytest.approx(factor * results["plain"][name], rel=1e-4)
    assert results[case]["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(float(factor == 2))


def test_a_loss_of_whole_responses_takes_the_geometric_means_of_token_weights(results: Results) -> None:
    for name in ("actor/pg_loss", "grad_norm"):
        assert results["geo_mean, weights 1.5"][name] == pytest.approx(1.5 * results["geo_mean"][name], rel=1e-4)


def test_a_bad_response_that_the_policy_has_left_behind_teaches_nothing(results: Results) -> None:
    got, want = results["left behind"], results["left behind by hand"]
    assert 0 < want["actor/off_policy_masked"] < 1
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-4), name
    assert "actor/off_policy_masked" not in results["plain"]


@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_a_rejected_response_is_as_if_it_had_never_been_drawn(results: Results, loss: str) -> None:
    rejects, without = results[f"{loss} rejects"], results[f"{loss} without"]
    for name in ("loss", "grad_norm", "actor/entropy"):
        assert rejects[name] == pytest.approx(without[name], rel=1e-5, abs=1e-7), name
    assert rejects["grad_norm"] != pytest.approx(results["plain"]["grad_norm"], rel=1e-2)
    assert rejects["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(0.1)


def test_a_mini_batch_that_is_all_rejected_teaches_nothing(results: Results) -> None:
    everything = results["everything rejected"]
    assert everything["loss"] == everything["grad_norm"] == everything["skipped"] == 0
    assert everything["rollout_corr/rollout_rs_masked_fraction"] == 1


def test_only_the_tokens_of_highest_entropy_learn_and_the_denominator_counts_all(results: Results) -> None:
    want = results["high entropy by hand"]
    assert results["high entropy"]["actor/pg_loss"] == pytest.approx(want["actor/pg_loss"], rel=1e-4, abs=1e-7)
    assert want["share"] == pytest.approx(0.2, abs=0.01)


def test_the_mismatch_is_the_same_whether_a_pass_of_its_own_or_the_first_update_finds_it(results: Results) -> None:
    first, own = (results[f"mismatch {single}"] for single in (True, False))
    names = {"mismatch/mean_abs", "mismatch/max_abs", "mismatch/max_sample"}
    names |= {"mismatch/kl", "mismatch/k3_kl", "mismatch/ess"}
    assert {name for name in own if name.startswith("mismatch/")} == names
    for name in names:
        assert first[name] == pytest.approx(own[name], rel=1e-4)
    assert first["mismatch/max_abs"] > first["mismatch/mean_abs"] > 0.1


def test_a_mini_batch_that_the_policy_has_left_counts_0_times(results: Results) -> None:
    far, near = results["ratio 20"], results["ratio 7"]
    assert far["actor/ratio"] == pytest.approx(math.exp(3), rel=1e-4)
    assert (far["actor/loss_zeroed"], far["grad_norm"], far["skipped"]) == (1, 0, 0)
    assert near["actor/loss_zeroed"] == 0 and near["grad_norm"] > 0


def test_a_step_ends_early_when_the_policy_has_moved_far_enough(results: Results) -> None:
    assert results["stops"]["actor/epochs"] == 1
    assert results["goes on"]["actor/epochs"] == 3
    assert results["stops"]["actor/approxkl"] > 0


def test_shuffled_mini_batches_are_the_same_ones_under_every_layout(results: Results) -> None:
    plain, shuffled = (results[f"cp2, shuffled: {shuffle}"] for shuffle in (False, True))
    assert results["dp2, shuffled: True"] == pytest.approx(shuffled, rel=1e-3, abs=1e-5)
    assert shuffled["actor/ppo_kl"] != pytest.approx(plain["actor/ppo_kl"], rel=1e-2)
