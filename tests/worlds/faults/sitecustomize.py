"""Injects faults into the ranks of `mrl train`. Python imports this module at start if its folder is on PYTHONPATH.

MRL_TEST_FAULTS: a file with a JSON list, one entry per attempt of a run, each null or {kind: kill | exception | hang,
section, rank, nth, early}: what `rank` does when it enters `section` for the nth time (from 1); with `early`, before
its monitor is told. The Unix time of each fault is appended to FILE.fired.

MRL_TEST_SLOW: "RANK SECONDS", a rank that computes that much longer in each update.

MRL_TEST_HELD: a file with a JSON list of {call, nth}. The nth call of this method of `EngineClient` creates FILE.NUMBER
(its index in the list) and continues once FILE.NUMBER.go exists.

MRL_TEST_OLD: a tensor that every weight sync sends with its value at the first sync.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HELD_S = 120.0


class Injected(RuntimeError):
    """An error that no part of the program handles."""


def do(kind: str) -> None:
    with open(os.environ["MRL_TEST_FAULTS"] + ".fired", "a") as file:
        file.write(f"{time.time()}\n")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exception":
        raise Injected("an injected error")
    while True:
        time.sleep(1)


def compute(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


@functools.cache
def wanted() -> tuple[int, dict[str, Any] | None, int, float]:
    """Returns this process's rank and fault, and the slow rank with its seconds. Called in the rank itself, which is
    often a fork of a process that is not a rank."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    plan = json.loads(Path(os.environ["MRL_TEST_FAULTS"]).read_text()) if "MRL_TEST_FAULTS" in os.environ else []
    slow_rank, slow_s = os.environ.get("MRL_TEST_SLOW", "-1 0").split()
    return rank, plan[attempt] if attempt < len(plan) else None, int(slow_rank), float(slow_s)


def patch(module: Any) -> None:
    entered: dict[str, int] = {}
    enter = module._RankWatch.enter

    def faulty(self: Any, name: str) -> None:
        rank, fault, slow_rank, slow_s = wanted()
        entered[name] = entered.get(name, 0) + 1
        is_due = fault and (rank, name, entered[name]) == (fault["rank"], fault["section"], fault["nth"])
        if fault and is_due and fault.get("early"):
            do(fault["kind"])
        enter(self, name)
        if fault and is_due:
            do(fault["kind"])
        if name == "update" and rank == slow_rank:
            compute(slow_s)

    module._RankWatch.enter = faulty


def hold(module: Any) -> None:
    called: dict[str, int] = {}

    def held(name: str) -> Callable[..., Any]:
        method = getattr(module.EngineClient, name)

        def call(*arguments: Any, **named: Any) -> Any:
            called[name] = called.get(name, 0) + 1
            if {"call": name, "nth": called[name]} in plan:
                at = Path(f"{file}.{plan.index({'call': name, 'nth': called[name]})}")
                at.touch()
                end = time.monotonic() + HELD_S
                while not Path(f"{at}.go").exists() and time.monotonic() < end:
                    time.sleep(0.02)
            return method(*arguments, **named)

        return call

    if (file := os.environ.get("MRL_TEST_HELD")) is not None:
        plan = json.loads(Path(file).read_text())
        for name in {entry["call"] for entry in plan}:
            setattr(module.EngineClient, name, held(name))


def keep_old(module: Any) -> None:
    old, take, first = os.environ.get("MRL_TEST_OLD"), module.BucketFiller.add, list[Any]()

    def faulty(self: Any, name: str, tensor: Any) -> None:
        if name == old:
            first.append(tensor.clone())
        take(self, name, first[0] if name == old else tensor)

    module.BucketFiller.add = faulty


PATCHES = {"mrl.resilience.sections": patch, "mrl.inference.client": hold, "mrl.weights.sync.filler": keep_old}


class Finder:
    """An import hook that patches modules right after they are loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in PATCHES:
            return None
        change = PATCHES.pop(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "train" in sys.orig_argv:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
