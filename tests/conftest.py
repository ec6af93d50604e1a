"""Fixtures of all tests: tiny model directories. Also the order in which test files run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.imports import importing
from tests.helpers.slow import RUN_SLOW

TinyModels = Callable[..., Path]


def pytest_configure(config: pytest.Config) -> None:
    """Restores SIGINT, which a shell ignores in background jobs and their children. Under pytest-xdist, starts the
    engines' fork servers, which all workers share."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None):
        from tests.helpers import engine_fork_servers

        engine_fork_servers.start()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collects the test modules in every worker, with fast imports."""
    with importing():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out slow tests unless RUN_SLOW=1, and puts long files first, so that no worker ends alone with one."""
    if not RUN_SLOW:
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    order = {"longest": 0, "long": 1}
    items.sort(
        key=lambda item: min((order[mark.name] for mark in item.iter_markers() if mark.name in order), default=2)
    )


@pytest.fixture(scope="module", autouse=True)
def no_world_is_left() -> Iterator[None]:
    """Fails if a test file leaves its process in a process group, which would fail the worker's next test with one."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("a test of this file has left its process in a process group")


@pytest.fixture(params=["C", "torch"])
def each_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test with each of the two implementations of a kernel, and returns the name of the one in use."""
    from mrl.kernels import native  # imports torch, which the process that distributes tests does not need

    form: str = request.param
    if form == "torch":
        monkeypatch.setattr(native, "supports_tensors", lambda *tensors: False)
    return form


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Returns `tiny_models(family, tied=False, seed=0, weights=True, **config overrides)`, which makes a Hugging Face
    directory.

    The same arguments return the same directory, so tests must not write into it.
    """
    from tests.helpers.tiny import make_tiny

    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def get(family: str, **settings: Any) -> Path:
        key = repr((family, sorted(settings.items(), key=lambda item: item[0])))
        if key not in made:
            made[key] = make_tiny(root / f"{family}_{len(made)}", family, **settings)
        return made[key]

    return get
