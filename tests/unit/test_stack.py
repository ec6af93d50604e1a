"""Both stacks, Python 3.11 with Megatron-Core 0.16 and Python 3.12 with 0.19: what was run, and who is told."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from mrl import platform
from mrl.preflight import versions
from tools.stack import support
from tools.stack.run import CHECKS, RESULTS, ROOT


def test_submodules_are_found_in_both_forms_of_a_spec() -> None:
    own = SimpleNamespace()
    assert platform.submodules(SimpleNamespace(submodules=own)) is own
    assert platform.submodules(functools.partial(dict, submodules=own)) is own


def test_the_table_of_support_is_that_of_the_committed_results() -> None:
    page = support.PAGE.read_text()
    assert support.filled(page, json.loads(RESULTS.read_text())) == page, "python -m tools.stack.support writes it"


def test_the_committed_results_are_of_these_checks_and_versions() -> None:
    found = json.loads(RESULTS.read_text())
    assert {row["check"] for row in found["checks"]} <= set(CHECKS)
    of_python = {".".join(found["other"]["python"].split(".")[:2]): found["other"]}
    of_python[".".join(found["machine"]["python"].split(".")[:2])] = found["stack"]
    for python, parts in versions.STACKS.items():
        assert {part: of_python[python][part].split("+")[0] for part in parts} == parts


@pytest.mark.parametrize("python", versions.STACKS)
def test_the_constraints_of_each_python_are_its_stack(python: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    asked = [Requirement(line) for line in lines if "==" in line]
    here = {"python_version": python}
    pinned = {one.name: str(one.specifier)[2:] for one in asked if one.marker is None or one.marker.evaluate(here)}
    assert {part: pinned[part] for part in versions.STACKS[python]} == versions.STACKS[python]


def test_an_untested_combination_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "PYTHON", "3.12")
    monkeypatch.setattr(versions, "versions", lambda *parts: {**versions.STACKS["3.12"], "torch": "2.13.0+cu130"})
    assert versions.untested_combination() is None
    monkeypatch.setattr(versions, "versions", lambda *parts: versions.STACKS["3.11"])
    said = versions.untested_combination() or ""
    assert said.startswith("untested combination: Python 3.12 with torch 2.13.0, megatron-core 0.16.1")
    assert "Tested: Python 3.11 with torch 2.13.0, megatron-core 0.16.1" in said and "megatron-core 0.19.2" in said
    monkeypatch.setattr(versions, "PYTHON", "3.13")
    assert versions.untested_combination() is not None
