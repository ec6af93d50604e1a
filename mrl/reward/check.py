"""Checks of rewards before anything is scored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.reward.errors import RewardError, SampleError
from mrl.reward.loading import answer_problem
from mrl.reward.manager import builtin_settings, prompt_text
from mrl.reward.plan import Component, make_plan
from mrl.reward.pool import FunctionPool
from mrl.reward.sandbox.isolate import readable_through
from mrl.reward.score_requests import ScoreRequest
from mrl.reward.server import unserializable_value
from mrl.workers.pool import STARTUP_TIMEOUT_S

if TYPE_CHECKING:
    from mrl.config.schema import DataConfig, RewardConfig


def row_check(cfg: RewardConfig, data: DataConfig) -> Callable[[Mapping[str, Any]], str | None]:
    """Returns f(row): the reason why no response to this row could be scored; None if it could.

    With `on_error: zero` a row may lack its answer: it scores 0 and is counted. With `leave_out` a row must have its
    answer, since nothing would be learnt from it. Rows for a reward server must be valid JSON.
    """
    plan, zero = make_plan(cfg), cfg.on_error == "zero"

    def check(row: Mapping[str, Any]) -> str | None:
        try:
            mix = plan.mix_of(row, data.data_source_key)
        except RewardError as error:
            return f"the row {error}"
        used = [plan.components[name] for name in mix]
        builtins = [c.spec for c in used if c.kind == "function" and ":" not in c.spec]
        problems = [answer_problem(spec, row, data.answer_key, cfg.code.unsplit) for spec in builtins if not zero]
        if any(c.kind == "server" and cfg.servers[c.spec].api == "mrl" for c in used):
            problems.append(unserializable_value(row))
        return next(filter(None, problems), None)

    return check


def check_hidden(cfg: RewardConfig, paths: Mapping[str, str]) -> None:
    """Raises RewardError if sandboxed programs of the built-in `code` could read one of `paths`, by description."""
    specs = {component.spec for component in make_plan(cfg).components.values()}
    if "code" not in specs or cfg.code.isolation == "none":
        return
    for name, path in {**paths, "the package mrl": str(Path(__file__).parents[1])}.items():
        folder = readable_through(path)
        if folder is not None:
            raise RewardError(
                f"{name}: the programs that the built-in reward 'code' runs can read all of {folder}, and so {path}: "
                "move it elsewhere"
            )


@dataclass(frozen=True)
class TrialRow:
    """A row of the data to try functions on. where: file and row; pictures: as in `ScoreRequest`"""

    where: str
    row: dict[str, Any]
    pictures: tuple[bytes, ...] | None = None


def check_functions(cfg: RewardConfig, data: DataConfig, trials: Iterable[TrialRow] = ()) -> list[str]:
    """Loads every function once, in its own process within STARTUP_TIMEOUT_S, and lets each of the user's functions
    score the first suitable row of `trials`, with the row's own answer as the response. Returns the problems found.

    Raises RewardError if a function cannot be imported, is not a function, or takes other arguments.
    """
    plan = make_plan(cfg)
    functions = plan.of_kind("function", "batch")
    if not any(c.spec == "code" or ":" in c.spec for c in functions):
        return []
    pool = FunctionPool(functions, builtin_settings(cfg), data.answer_key, 1, cfg.timeout_s, cfg.pictures)
    try:
        untried = {c.name: c for c in functions if ":" in c.spec}
        problems = []
        for trial in trials if untried else ():
            try:
                mix = plan.mix_of(trial.row, data.data_source_key)
            except RewardError:  # reported by the row check
                continue
            problems += [_try_out(pool, untried.pop(name), trial, data) for name in untried.keys() & mix.keys()]
            if not untried:
                break
        return [problem for problem in problems if problem is not None]
    finally:
        pool.close()


def _try_out(pool: FunctionPool, component: Component, trial: TrialRow, data: DataConfig) -> str | None:
    answer = trial.row.get(data.answer_key)
    response = answer if isinstance(answer, str) else ""
    call = ScoreRequest(prompt_text(trial.row.get(data.prompt_key, "")), response, trial.row, pictures=trial.pictures)
    running = pool.submit(component, [call], [f"{trial.where}, with the response {response[:40]!r},"])
    try:
        [outcome] = running.result(pool.timeout_s + STARTUP_TIMEOUT_S)
    except TimeoutError:
        return f"reward.{component.where}: no score of {trial.where} within {pool.timeout_s:g} s"
    return f"reward.{component.where}: {outcome}" if isinstance(outcome, SampleError) else None
