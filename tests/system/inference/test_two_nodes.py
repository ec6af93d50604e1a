"""Engines on two nodes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest

from mrl.config.derived import Machine
from mrl.config.engines import ENGINES, EngineKind
from mrl.config.schema import RolloutConfig
from mrl.core import SamplingParams
from mrl.inference.access import Access
from mrl.inference.agent import Agent, Home
from mrl.inference.start import Others, start_engine, start_servers
from tests.conftest import TinyModels
from tests.system.inference.test_rollout_engines import requests
from tests.unit.inference.test_nodes import KEY, wait_for


def test_engines_of_two_nodes_sample_and_one_is_brought_back_by_its_own(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines on two nodes generate, and a dead one is restarted by its own node. The toy engine's processes are real;
    both nodes are in this process."""
    monkeypatch.setitem(ENGINES, "echo", EngineKind("tests.helpers.echo_engine:echo_launch"))
    cfg, model = RolloutConfig(engine="echo"), str(tiny_models("llama", weights=False))
    machine, notes, given = Machine(1, 1, 0), [], []
    with contextlib.ExitStack() as stack:
        processes = start_servers(cfg, model, "float32", tmp_path, 1, machine, Home(1), Access(KEY, ours=True))
        agent = stack.enter_context(contextlib.closing(Agent(Home(1), "node 1 (here)", processes, KEY)))
        others = Others(KEY, Home(0), [agent.offered])
        engine = stack.enter_context(start_engine(cfg, model, "float32", tmp_path, 1, machine=machine, others=others))
        engine.wait_ready()
        engine.pool.restarts.allow(notes.append, given.append)
        assert [server.url for server in engine.pool.servers] == [*engine.urls]
        assert engine.urls[1:] == agent.offered.urls
        asked = requests([(3 + n, 4, 5) for n in range(80)])
        assert len(engine.generate(asked, SamplingParams(max_new_tokens=2))) == 80
        (far,) = (server for server in engine.pool.servers if server.url == engine.urls[1])
        port = far.url.rpartition(":")[2]
        for process in psutil.process_iter(["cmdline"]):
            if (process.info["cmdline"] or [])[-1:] == [port] and "-I" not in process.info["cmdline"]:
                process.kill()  # its supervisor stays
        wait_for(lambda: far.has_ended)
        assert len(engine.generate(asked, SamplingParams(max_new_tokens=2))) == 80
        wait_for(lambda: far.up)
    assert given == [engine.urls[1]]
    assert "engine 1 on node 1 (here) ended with" in notes[0]
    assert (tmp_path / "engine_1.log").exists()
