"""Engines larger than a node on the trainer's own nodes: two launchers on this machine act as two nodes."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import os
import pickle
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mrl.inference.serving import Route, Server
from mrl.observe import read_metrics
from mrl.ports import free_port
from tests.conftest import TinyModels
from tests.helpers.runs import results
from tests.helpers.train_tools import Train, write_config
from tests.helpers.world import run_world
from tests.system.cluster.test_cluster import steps_made, wait_for

LIMIT_S = 150.0
STEPS = 4
# Each pipeline stage, and with it a sender of weights, is on its own node; so is each half of the engine.
RUN: dict[str, Any] = {
    "actor": {"parallel": {"tensor": 2, "pipeline": 2}, "optimizer": {"lr": 5e-3}, "offload": "all"},
    "run": {"steps": STEPS, "nproc": 2},
    "placement": {"nodes_per_engine": 2},
    "rollout": {"engine": "sglang", "tensor": 2, "release": "all"},
    "sync": {"verify": "checksum", "bucket_mib": 1, "timeout_s": 60.0},
}


def writers_of(log: Path) -> list[psutil.Process]:
    """Returns the engine's processes that write to the log, without its supervisor."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.readlink(f"/proc/{process.pid}/fd/1") == str(log) and "supervisor.py" not in str(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.slow
def test_an_engine_over_both_nodes_of_a_run_loses_a_half_and_comes_back(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    """An engine over both nodes loses one half and is restarted. Every sync is verified on both halves."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs sglang")
    config, run_dir = write_config(tmp_path, tiny_models("llama"), **RUN), tmp_path / "runs" / "run"
    where = ["--nodes=2", f"--head=127.0.0.1:{free_port()}"]
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(Train(tmp_path, config, *where, f"--node={number}", GLOO_SOCKET_IFNAME="lo"))
            for number in range(2)
        ]
        wait_for(lambda: steps_made(run_dir) >= 2, lambda: nodes[0].terminal + nodes[1].terminal)
        halves = [writers_of(run_dir / "logs" / f"engine_{number}.log") for number in range(2)]
        assert all(halves)
        max(halves[1], key=lambda process: process.memory_info().rss).kill()
        codes = [node.wait(LIMIT_S) for node in nodes]
        said = nodes[0].terminal
        assert codes == [0, 0], said[-4000:] + nodes[1].terminal[-2000:]
        assert [node.left_running() for node in nodes] == [{}, {}]
    assert not any(process.is_running() for half in halves for process in half), "a half of the former engine"
    rows = results(run_dir)
    assert sorted(rows) == list(range(1, STEPS + 1))
    assert sum(row["rollout/engine_restarts"] for row in rows.values()) == 1
    assert "engine 0 and 1 more" in said
    for row in read_metrics(run_dir):
        assert row["sync/engine_bytes"] == 2 * row["sync/network_bytes"] == 2 * row["sync/bytes"]
        assert row["mismatch/max_abs"] < 1e-4, "what was sampled after it is of the trainer's weights"


class Parts:
    """An engine of four processes that records each process's tensors by its own handle. read: tensors by version"""

    def __init__(self) -> None:
        self.read: dict[str, list[dict[str, Tensor]]] = {}
        self._now: list[dict[str, Tensor]] = [{} for _ in range(4)]
        quiet = ("/begin_weight_update", "/end_weight_update", "/flush_cache")
        routes: dict[str, Route] = {path: lambda body: {"success": True} for path in quiet}
        routes |= {"/update_weights_from_tensor": self._load, "/update_weight_version": self._name}
        self.server = Server(0, "", routes)
        self.url = f"http://127.0.0.1:{self.server.port}"

    def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        for its, handle in zip(self._now, body["serialized_named_tensors"], strict=True):
            its |= {name: tensor.clone() for name, tensor in pickle.loads(base64.b64decode(handle))}
        return {"success": True}

    def _name(self, body: dict[str, Any]) -> dict[str, Any]:
        self.read[body["new_version"]], self._now = self._now, [{} for _ in range(4)]
        return {"success": True}


def test_every_process_of_every_engine_reads_all_that_was_sent(tiny_models: TinyModels) -> None:
    model, engines = tiny_models("llama"), [Parts(), Parts()]
    for engine in engines:
        engine.server.wanted = b""
    run_world(4, "multi_node_engine.py", model, *(engine.url for engine in engines), timeout_s=120)
    assert [sorted(engine.read) for engine in engines] == [["7"], ["7", "8"]]
    sent = load_file(model / "model.safetensors")
    for process in (process for engine in engines for parts in engine.read.values() for process in parts):
        assert process.keys() == sent.keys()
        assert all(torch.equal(process[name], sent[name]) for name in sent)
