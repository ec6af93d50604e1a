"""A run's weight sync as its engines and their requests see it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mrl import platform

platform.install()

from mrl.config.schema import RLConfig  # noqa: E402
from mrl.inference.access import OPEN  # noqa: E402
from mrl.inference.engine import Engine  # noqa: E402
from mrl.inference.engine_pool import EnginePool  # noqa: E402
from mrl.inference.server import Server  # noqa: E402
from mrl.inference.server_info import UNCHECKED  # noqa: E402
from mrl.weights.errors import SyncError  # noqa: E402
from tests.helpers.bare_run import bare_run  # noqa: E402


def test_a_weight_sync_is_over_when_it_has_failed() -> None:
    pool = EnginePool(
        [Server("http://127.0.0.1:1")],
        OPEN,
        lambda url: (UNCHECKED, ()),
        startup_timeout_s=9.0,
        max_restarts=0,
        memory_timeout_s=9.0,
    )
    was_syncing = []

    class Sync:
        def update_weights(self, version: str, verify: bool) -> None:
            was_syncing.append(pool.is_syncing)
            raise SyncError("an engine refuses")

    class World:
        def from_main(self, what: str, make: Any) -> Any:
            return make()

    class OnMain:
        engine = Engine(pool, vocab_size=9, concurrent_requests=1, request_timeout_s=1.0)

    cfg = RLConfig.model_validate({
        "trainer": "rl", "run": {"name": "r"}, "model": {"path": "-"}, "data": {"train": "-"},
        "reward": {"function": "exact_match"}, "algorithm": {"adv_estimator": "grpo", "lam": 1.0}, "critic": None,
        "batch": {"prompts_per_step": 1, "samples_per_prompt": 2},
    })  # fmt: skip
    nothing: Any = None
    parts: dict[str, Any] = {"sync": Sync(), "world": World(), "generator": OnMain()}
    run = replace(bare_run(cfg, nothing, None), **parts)
    with pytest.raises(SyncError, match="an engine refuses"):
        run.sync_weights(1)
    assert was_syncing == [True] and not pool.is_syncing
