"""What can be known of rewards before there is anything to score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.reward.errors import RewardError
from mrl.reward.loading import answer_problem
from mrl.reward.manager import pool_setup
from mrl.reward.plan import make_plan
from mrl.reward.pool import FunctionPool
from mrl.reward.sandbox.isolate import readable_through

if TYPE_CHECKING:
    from mrl.config.schema import DataConfig, RewardConfig


def row_check(cfg: RewardConfig, data: DataConfig) -> Callable[[Mapping[str, Any]], str | None]:
    """f(row): why no response to this row could be scored; None if one could. With `on_error: zero` a row may lack its
    answer: it scores 0 and is counted."""
    plan, zero = make_plan(cfg), cfg.on_error == "zero"

    def check(row: Mapping[str, Any]) -> str | None:
        try:
            mix = plan.mix_of(row, data.data_source_key)
        except RewardError as error:
            return f"the row {error}"
        specs = [plan.components[name].spec for name in mix if plan.components[name].kind == "function"]
        needs, unsplit = [spec for spec in specs if not zero and ":" not in spec], cfg.code.unsplit
        problems = (answer_problem(spec, row, data.answer_key, unsplit) for spec in needs)
        return next(filter(None, problems), None)

    return check


def check_hidden(cfg: RewardConfig, paths: Mapping[str, str]) -> None:
    """RewardError where the programs that the built-in `code` shuts in could read one of `paths`, each by what it is
    called."""
    specs = {component.spec for component in make_plan(cfg).components.values()}
    if "code" not in specs or cfg.code.isolation == "none":
        return
    for name, path in {**paths, "the package mrl": str(Path(__file__).parents[1])}.items():
        folder = readable_through(path)
        if folder is not None:
            raise RewardError(
                f"{name}: the programs that built-in reward 'code' runs could read {path}, as all of {folder}: "
                "keep it elsewhere"
            )


def check_functions(cfg: RewardConfig) -> None:
    """Loads every function once, in a process of its own that is given STARTUP_TIMEOUT_S. RewardError if one cannot be
    imported, is none, or takes other arguments."""
    setup = pool_setup(cfg, make_plan(cfg))
    if setup is not None and any(c.spec == "code" or ":" in c.spec for c in setup.components):
        FunctionPool(replace(setup, workers=1)).close()
