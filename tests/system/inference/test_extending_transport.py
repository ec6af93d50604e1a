"""A new weight transport needs one file, one line in the table, and its name in the configuration."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from mrl.config.schema import SyncConfig
from mrl.weights.sync.transports import TRANSPORTS
from tests.helpers.recipe import ROOT, Recipe

CODE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from mrl.config.schema import SyncConfig
from mrl.weights.sync.weight_sync import WeightSync
from mrl.weights.sync.transports import paced_http
from tests.helpers.sync_tools import FileExporter

model, url = sys.argv[1:]
exporter = FileExporter(Path(model))
sync = WeightSync(exporter, [url], SyncConfig(transport="paced_http", bucket_mib=1))
size = sum(tensor.nbytes for tensor in exporter.tensors.values())
waits = []
paced_http.RATE = 1e-6 * size
paced_http.time = SimpleNamespace(monotonic=lambda: 0.0, sleep=waits.append)
report = sync.update_weights("7")
assert round(sum(waits)) == 10**6 and report.bytes == size and report.transport == "paced_http", (waits, report)
sync.close()
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    """Starts a fake engine and returns its address."""
    file = tmp_path / "port"
    process = subprocess.Popen([sys.executable, "-S", str(ROOT / "tests/worlds/fake_engine.py"), str(file), "ok"])
    try:
        for _ in range(600):
            if file.exists():
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{file.read_text()}"
    finally:
        process.kill()
        process.wait(60)


def test_the_recipe_is_one_file_and_two_lines(tmp_path: Path) -> None:
    recipe = Recipe("A transport of weights", tmp_path / "copy")
    assert (len(recipe.new), len(recipe.changed)) == (1, 2)


@pytest.mark.slow
def test_the_recipe(tmp_path: Path, engine: str, tiny_models: Any) -> None:
    import httpx

    recipe = Recipe("A transport of weights", tmp_path / "copy")
    recipe.run(CODE, tiny_models("llama"), engine)
    calls = httpx.get(f"{engine}/calls", trust_env=False).json()["calls"]
    assert "update_weights_from_tensor" in calls and calls[-1] == "update_weight_version", json.dumps(calls)


def test_the_configuration_names_what_is_in_the_table() -> None:
    assert set(get_args(SyncConfig.model_fields["transport"].annotation)) == {"auto", *TRANSPORTS}
