"""Ranks that share one device: their collectives against plain gloo's, and the stage `ranks` rehearsed on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.slow import slow_cases
from tests.helpers.world import run_world
from tools.gpu import stage_ranks
from tools.gpu.stage import Failed, Setting

LAYOUTS = ("tp2", "pp2", *slow_cases("cp2", "ep2", "dp2", "tp2.pp2"))
PRECISIONS = ("float32", *slow_cases("bfloat16", "current", "blockwise"))


def test_staged_collectives_are_gloo_s_to_the_bit() -> None:
    """Every function copies tensors to host memory on each rank."""
    found = json.loads(run_world(2, "staged_collectives.py", timeout_s=300).splitlines()[-1])
    assert {name: equal for name, (equal, _) in found.items()} == dict.fromkeys(found, True)
    assert not [name for name, (_, copies) in found.items() if copies == 0]
    assert len(found) > 20


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    made = Setting(tmp_path_factory.mktemp("ranks"), rehearsal=True)
    stage_ranks.run_worlds(made, LAYOUTS, PRECISIONS)
    return made


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_agrees_with_one_rank(layout: str, precision: str, setting: Setting) -> None:
    stage_ranks.against_one(layout, precision)(setting)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_one_rank(setting: Setting) -> None:
    stage_ranks.resumed(setting)


@pytest.mark.slow
@pytest.mark.engine
def test_weights_of_four_ranks_reach_one_sglang(setting: Setting) -> None:
    """Through shared memory; on a GPU by CUDA IPC."""
    found = stage_ranks.synced(setting)
    assert found["verified"] == found["tensors"] > 0


def test_a_wrong_gradient_fails(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stage_ranks.result

    def altered(setting: Setting, case: str) -> dict[str, object]:
        found = real(setting, case)
        if ":one:" in case:
            found["gradients"]["model.norm.weight"] *= 1 + 1e-4
        return found

    monkeypatch.setattr(stage_ranks, "result", altered)
    with pytest.raises(Failed, match="worst"):
        stage_ranks.against_one("pp2", "float32")(setting)


def test_a_world_that_fails_says_why(tmp_path: Path) -> None:
    setting = Setting(tmp_path, rehearsal=True)
    (tmp_path / "ranks").mkdir()
    for ranks in (4, 2, 1):
        (tmp_path / "ranks" / f"{ranks} ranks.txt").write_text("" if ranks > 2 else f"{ranks} ranks: no memory")
    with pytest.raises(Failed, match="dense:pp2:float32 was not computed: .*2 ranks: no memory"):
        stage_ranks.against_one("pp2", "float32")(setting)


def test_differences_are_relative_to_each_tensor() -> None:
    want = {"small": torch.full((4,), 1e-3), "large": torch.full((4,), 10.0)}
    found = stage_ranks.differences(want | {"small": want["small"] * 1.1}, want)
    assert found["of"] == "small"
    assert (found["worst"], found["mean"]) == (pytest.approx(0.1, rel=1e-3), pytest.approx(0.05, rel=1e-3))
    with pytest.raises(Failed, match="only one side has"):
        stage_ranks.differences(want, want | {"other": want["small"]})
