"""Ranks that share a node, and rank 0's view of engines on another node. The engines are stubs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import httpx
import pytest

from mrl.inference.access import Access, listeners
from mrl.inference.agent import Agent, ElsewhereEngine, Home, OtherNode
from mrl.inference.errors import EngineStartError, PortTaken, RolloutError
from mrl.inference.process import EngineProcess
from mrl.parallel import Nodes
from mrl.ports import free_port, is_here, listen

KEY = "a" * 64


class StandIn:
    """The parts of an EngineProcess that an agent uses."""

    def __init__(self, number: int) -> None:
        self.name, self.url, self.log = f"engine {number}", f"http://127.0.0.1:{number}", Path(f"engine_{number}.log")
        self.code: int | None = None
        self.problem: Exception | None = None
        self.closed = False
        self.here = [self]

    def exit_code(self) -> int | None:
        return self.code

    def is_ready(self, timeout_s: float) -> bool:
        if self.problem is not None:
            raise self.problem
        return timeout_s == 7.0

    def exit_report(self) -> str:
        return f"{self.name} is no more"

    def restart(self) -> None:
        self.code = None

    def close(self) -> None:
        self.closed = True


class Node:
    """Node 3 with two engines, as it is and as rank 0 sees it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stand_ins = [StandIn(6), StandIn(7)]
        engines = cast("list[EngineProcess]", self.stand_ins)
        self.agent = stack.enter_context(contextlib.closing(Agent(Home(3), "node 3 (here)", engines, KEY)))
        self.other = stack.enter_context(contextlib.closing(OtherNode(self.agent.offered, Access(KEY, ours=True))))
        self.engines: list[ElsewhereEngine] = self.other.engines


@pytest.fixture
def node() -> Iterator[Node]:
    with contextlib.ExitStack() as stack:
        yield Node(stack)


def wait_for(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_node_is_its_launcher_s_number() -> None:
    nodes = Nodes((0, 0, 2, 2), rank=2)
    assert (nodes.mine, nodes.all, nodes.ranks(2), nodes.is_first) == (2, (0, 2), [2, 3], True)
    assert not Nodes(nodes.of, rank=3).is_first


def test_an_engine_elsewhere_is_known_as_one_of_the_own_node(node: Node) -> None:
    second = node.engines[1]
    assert (second.name, second.url) == ("engine 7 on node 3 (here)", "http://127.0.0.1:7")
    assert second.is_ready(7.0) and not second.is_ready(8.0)
    assert second.exit_report() == "engine 7 is no more"
    assert second.exit_code() is None


def test_its_end_is_heard_of_and_forgotten_with_its_restart(node: Node) -> None:
    node.stand_ins[1].code = 137
    wait_for(lambda: node.engines[1].exit_code() == 137)
    assert node.engines[0].exit_code() is None
    node.engines[1].restart()
    assert node.engines[1].exit_code() is None, "that of the former start"
    node.stand_ins[1].code = 1
    wait_for(lambda: node.engines[1].exit_code() == 1)


@pytest.mark.parametrize("kind", [EngineStartError, PortTaken])
def test_why_it_does_not_start_is_the_error_that_its_node_had(kind: type[Exception], node: Node) -> None:
    node.stand_ins[0].problem = kind("what it was")
    with pytest.raises(kind, match=r"node 3 \(here\): what it was") as caught:
        node.engines[0].is_ready(7.0)
    assert type(caught.value) is kind


def test_another_fault_of_its_node_s_names_the_node(node: Node) -> None:
    node.stand_ins[0].problem = OSError("disk full")
    with pytest.raises(RolloutError, match=r"node 3 \(here\): nobody answers .*disk full"):
        node.engines[0].is_ready(7.0)


def test_a_node_that_is_gone_is_named(node: Node) -> None:
    node.agent.close()
    assert all(engine.closed for engine in node.stand_ins)
    with pytest.raises(RolloutError, match=r"node 3 \(here\): nobody answers for its engines: restart"):
        node.engines[0].restart()
    assert "node 3" in node.engines[0].exit_report()


@pytest.mark.parametrize("path", ["/ended", "/ready", "/exit_report", "/restart", "/elsewhere"])
def test_strangers_are_told_nothing(path: str, node: Node) -> None:
    node.stand_ins[0].code = 5
    url = node.agent.offered.agent + path
    for headers in ({}, {"Authorization": "Bearer no"}):
        assert httpx.post(url, json={"engine": 0}, headers=headers, trust_env=False).status_code == 401
    assert node.stand_ins[0].code == 5


def test_without_the_key_a_node_says_only_that_it_is_there(node: Node) -> None:
    reply = httpx.get(node.agent.offered.agent + "/health", trust_env=False)
    assert (reply.status_code, reply.json()) == (200, {})
    assert httpx.post(node.agent.offered.agent + "/health", json={}, trust_env=False).status_code == 401


def test_a_node_that_may_leave_is_gone_when_it_says_so_or_says_nothing(node: Node) -> None:
    with contextlib.ExitStack() as stack:
        leaving, silent = (Agent(Home(number), "node", (), KEY) for number in range(2))
        access = Access(KEY, ours=True)
        nodes = [OtherNode(agent.offered, access, silence_s=60.0) for agent in (leaving, silent)]
        for each in (leaving, silent, *nodes):
            stack.enter_context(contextlib.closing(each))
        leaving.leave()
        wait_for(lambda: nodes[0].is_gone)
        assert not nodes[1].is_gone and not silent.run_is_over
        nodes[1].end_of_run()
        assert silent.run_is_over
        silent.close()
        wait_for(lambda: nodes[1].is_gone)
        assert not node.other.is_gone


@pytest.mark.parametrize("engine", [2, -1, "0", None])
def test_an_engine_that_is_not_there_is_refused(engine: object, node: Node) -> None:
    reply = httpx.post(
        node.agent.offered.agent + "/restart",
        json={"engine": engine},
        headers=Access(KEY).headers,
        trust_env=False,
    )
    assert reply.status_code == 400


def test_a_listener_is_looked_for_at_the_engine_s_own_address() -> None:
    port = free_port("127.0.0.2")
    with listen("127.0.0.2", port):
        assert len(listeners(port, "127.0.0.2")) == 1
        assert listeners(port) == []
    assert is_here("127.0.0.2") and not is_here("192.0.2.1")
