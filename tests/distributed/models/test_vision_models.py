"""Vision-language models: read from config.json, and equal to transformers under every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.slow import RUN_SLOW, slow_cases
from tests.helpers.tiny_vl import VL_FAMILIES, make_tiny_vl
from tests.helpers.world import run_world

pytestmark = pytest.mark.long

LAYOUTS = {
    "qwen3_vl": (
        "tp2.pp2/full",
        "cp2",
        "pp2/frozen/full",
        *slow_cases("one", "tp2", "tp2.sequence0", "tp2/full", "pp2", "tp2.cp2"),
    ),
    "qwen2_5_vl": ("tp2.cp2", *slow_cases("tp2.pp2/full", "pp2.vpp2", "dp4/frozen")),
}
ALONE = {"qwen3_vl": ("one", "one/frozen"), "qwen2_5_vl": ("one/full",)}  # in a world of one rank
WIDE = {  # in a world of eight: each replicated twice by data parallelism
    "qwen3_vl": ("tp2.cp2", "tp2.cp2/full", "tp2.cp2/frozen", "tp2.pp2", "tp2.pp2/frozen/full"),
    "qwen2_5_vl": ("tp2.cp2/full", "tp2.cp2/frozen/full", "tp2.pp2", "tp2.pp2/frozen"),
}
WORLDS = {4: LAYOUTS, 1: ALONE, 8: WIDE} if RUN_SLOW else {4: LAYOUTS}
WRONG = ("wrong:pp2.first1", "wrong:pp2.vpp2")
ALL = [(n, family, layout) for n, world in WORLDS.items() for family in world for layout in world[family]]
Results = dict[tuple[int, str], dict[str, Any]]  # by ranks and family


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vl")
    return {family: make_tiny_vl(root / family, family) for family in VL_FAMILIES}


@pytest.fixture(scope="module")
def results(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    root, found = tmp_path_factory.mktemp("results"), {}
    for ranks, layouts in WORLDS.items():
        jobs: list[str | Path] = []
        for family, model in models.items():
            first = () if ranks > 4 else ("reference",)
            wrong = WRONG if ranks == 4 and family == "qwen3_vl" else ()
            jobs += ["--", model, root / f"{family}.pt", root / f"{family}_{ranks}.json"]
            jobs += [*first, *layouts[family], *wrong]
        run_world(ranks, "vision_gradients.py", *jobs)
        for family in models:
            found[ranks, family] = json.loads((root / f"{family}_{ranks}.json").read_text())
    return found


@pytest.mark.parametrize(("ranks", "family", "layout"), ALL)
def test_log_probs_values_and_gradients_are_those_of_transformers(
    results: Results, ranks: int, family: str, layout: str
) -> None:
    found = results[ranks, family][layout]
    assert {"policy", "critic"} <= set(found)
    for case, (difference, error, worst) in found.items():
        assert difference < (1e-5 if case == "policy" else 1e-4), (case, difference)
        assert error < 2e-5, (case, worst, error)


@pytest.mark.parametrize("layout", WRONG)
def test_a_first_stage_without_the_layers_that_take_deep_features_is_refused(results: Results, layout: str) -> None:
    assert (
        "first 2 layers take deep image features, and the first pipeline stage has only 1"
        in results[4, "qwen3_vl"][layout]
    )
