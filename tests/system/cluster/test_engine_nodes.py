"""`mrl serve` and a run: registration, joining and leaving nodes, and how they end. The engines are toys."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import psutil
import pytest

from mrl.config.derived import Machine
from mrl.config.engines import ENGINES, EngineKind
from mrl.config.loader import load
from mrl.config.schema import RLConfig, RolloutConfig
from mrl.core import SamplingParams
from mrl.files import write_privately
from mrl.inference.access import Access
from mrl.inference.agent import Agent, Home
from mrl.inference.check import check_server
from mrl.inference.engine import Engine
from mrl.inference.errors import EngineStartError, RolloutError
from mrl.inference.launch import Part, ServerSpec
from mrl.inference.membership import NodeRecord, RouterClient, RouterProcess, engines_key, router_file
from mrl.inference.serve import EngineNode, Reason
from mrl.inference.serving import Server
from mrl.inference.sglang.command import sglang_launch
from mrl.inference.start import join_engines, start_engine
from mrl.ports import free_port, listen
from tests.conftest import TinyModels
from tests.helpers.train_tools import write_config
from tests.system.inference.test_rollout_engines import requests

pytestmark = pytest.mark.long

CPU = Machine(1, 0, gpus=0)
KEY = "a" * 64
ASKED = [(3 + n, 4, 5) for n in range(40)]


def wait_for(happens: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.02)


@dataclass
class Node:
    """A `mrl serve` in this process. said: messages to its user; why: reason of its end"""

    cfg: RLConfig
    run_dir: Path
    number: int
    received: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    why: object = None

    def __post_init__(self) -> None:
        self.node = EngineNode(self.cfg, self.run_dir, Home(self.number), CPU, self.received, self.said.append)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.why = self.node.serve()
        except EngineStartError as error:
            self.why = error

    def ends(self) -> object:
        """Waits until the node ends and returns the reason."""
        self._thread.join(60)
        self.node.close()
        return self.why


@dataclass
class Place:
    """A run and its nodes. engine: of the run; told: messages to the run's user"""

    folder: Path
    model: Path
    stack: contextlib.ExitStack
    told: list[str] = field(default_factory=list)
    given: list[str] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "run"

    def cfg(self, nodes: int = 1, wait_s: float = 20.0, away_s: float = 60.0, size: int = 1) -> RLConfig:
        placement = {"mode": "disaggregated", "nodes": nodes, "wait_s": wait_s, "silence_s": 3.0, "away_s": away_s}
        placement["nodes_per_engine"] = size
        rollout = {"engine": "light", "startup_timeout_s": 20.0, "tensor": size}
        cfg = load(write_config(self.folder, self.model, placement=placement, rollout=rollout))
        assert isinstance(cfg, RLConfig)
        return cfg

    def serve(self, number: int, cfg: RLConfig | None = None) -> Node:
        node = Node(cfg or self.cfg(), self.run_dir, number)
        self.stack.callback(node.node.close)
        wait_for(lambda: node.said or node.why)
        return node

    def join(self, cfg: RLConfig) -> Engine:
        engine = self.stack.enter_context(join_engines(cfg, self.run_dir))
        engine.pool.restarts.allow(self.told.append, self.given.append)
        return engine


@pytest.fixture
def place(tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setitem(ENGINES, "light", EngineKind("tests.helpers.light_engine:light_launch"))
    with contextlib.ExitStack() as stack:
        yield Place(tmp_path, tiny_models("llama"), stack)


def sample(engine: Engine) -> int:
    return len(engine.generate(requests(ASKED), SamplingParams(max_new_tokens=2)))


def test_a_node_that_does_not_answer_is_listed_as_such(place: Place) -> None:
    router = place.stack.enter_context(contextlib.closing(RouterProcess(place.run_dir, "127.0.0.1", 2.0)))
    router.wait_ready(60.0)
    agents = [Agent(Home(number), f"node {number}", (), KEY) for number in range(2)]
    records = [NodeRecord(agent.offered, {"a": True}, rendezvous="b") for agent in agents]
    for record in records:
        router.client.register(record, None)

    def listed() -> dict[int, bool]:
        return {node.record.engines.node: node.healthy for node in router.client.nodes()}

    wait_for(lambda: listed() == {0: True, 1: True})
    assert sorted(map(repr, (node.record for node in router.client.nodes()))) == sorted(map(repr, records))
    ready = replace(records[0], state="ready")
    router.client.register(ready, next(node for node in router.client.nodes() if node.record == records[0]))
    wait_for(lambda: ready in [node.record for node in router.client.nodes()])
    agents[1].close()
    wait_for(lambda: listed() == {0: True, 1: False})
    router.client.remove(next(node for node in router.client.nodes() if not node.healthy))
    wait_for(lambda: listed() == {0: True})
    agents[0].close()


def test_the_router_is_the_run_s_alone_and_goes_with_it(place: Place) -> None:
    engine = place.join(place.cfg())
    file = router_file(place.run_dir)
    assert file.stat().st_mode & 0o777 == 0o600
    found = json.loads(file.read_text())
    client = RouterClient(file)
    place.stack.callback(client.close)

    def answers() -> bool:
        with contextlib.suppress(RolloutError):
            return client.nodes() == []
        return False

    wait_for(answers)
    for headers in ({}, Access(engines_key(place.run_dir)).headers):
        reply = httpx.get(found["url"] + "/workers", headers=headers, trust_env=False)
        assert reply.status_code == 401
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not any(found["key"] in line for line in lines), "any account can read command lines"
    engine.close()
    assert not file.exists() and not answers()


@pytest.mark.parametrize("answer", [{"workers": [{"url": "http://a:1"}]}, {"workers": 7}, [], {}])
def test_what_is_no_router_lists_no_nodes(answer: object, place: Place, tmp_path: Path) -> None:
    with router({"/workers": answer}) as url:
        write_privately(tmp_path / "router.json", json.dumps({"url": url, "key": KEY}))
        with contextlib.closing(RouterClient(tmp_path / "router.json")) as client:
            with pytest.raises(RolloutError, match=f"{url} is no sglang-router: it answers"):
                client.nodes()


def test_an_address_of_another_machine_is_refused(place: Place) -> None:
    with pytest.raises(EngineStartError, match="placement.address: 192.0.2.77 is not an address of"):
        RouterProcess(place.run_dir, "192.0.2.77", 2.0)


def test_a_router_that_ends_is_started_again(place: Place) -> None:
    place.serve(0)
    engine = place.join(place.cfg())
    engine.wait_ready()
    port = json.loads(router_file(place.run_dir).read_text())["url"].rpartition(":")[2]
    for connection in psutil.net_connections("tcp"):
        if connection.status == "LISTEN" and connection.laddr.port == int(port) and connection.pid:
            psutil.Process(connection.pid).kill()
    assert sample(engine) == 40, "nothing is generated through it"
    place.serve(1)
    wait_for(lambda: sample(engine) == 40 and len(engine.urls) == 2)


def test_the_key_is_drawn_once_and_kept_from_others(tmp_path: Path) -> None:
    keys = {engines_key(tmp_path / "run") for _ in range(3)}
    assert len(keys) == 1 and len(keys.pop()) == 64
    (tmp_path / "run" / "engines" / "key").chmod(0o640)
    with pytest.raises(ValueError, match="can be read or written by other users"):
        engines_key(tmp_path / "run")


def test_engines_come_later_and_go(place: Place) -> None:
    first = place.serve(0)
    engine = place.join(place.cfg())
    engine.wait_ready()
    assert len(engine.urls) == 1 and sample(engine) == 40
    second = place.serve(1)
    wait_for(lambda: sample(engine) == 40 and len(engine.urls) == 2)
    assert place.given == [engine.urls[1]], "weights before requests"
    first.node.close()
    wait_for(lambda: sample(engine) == 40 and len(engine.urls) == 1)
    assert any("engine 0 on node 0" in line and "has left" in line for line in place.told)
    assert engine.present() == (engine.urls, ())
    third = place.serve(0)
    wait_for(lambda: len(engine.present()[0]) == 2)
    urls, new = engine.present()
    assert len(new) == 1 and new[0] == urls[1] and engine.urls == urls[:1], "no request before the push"
    engine.has_synced("0")
    assert engine.urls == urls and sample(engine) == 40
    engine.pool.end_of_run()
    assert (second.ends(), third.ends()) == (Reason.RUN_IS_OVER, Reason.RUN_IS_OVER)


def test_an_engine_that_dies_alone_is_started_again_by_its_node(place: Place) -> None:
    place.serve(0)
    engine = place.join(place.cfg())
    engine.wait_ready()
    (server,) = engine.pool.servers
    kill_engine_at(server.url)
    wait_for(lambda: server.has_ended)
    assert sample(engine) == 40 and engine.urls == (server.url,)
    assert engine.pool.restarts.made == 1 and place.given == [server.url]


def kill_engine_at(url: str) -> None:
    """Kills the engine's process, not its supervisor."""
    port = url.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [])[-1:] == [port] and "-I" not in process.info["cmdline"]:
            process.kill()


def test_without_any_engine_a_run_waits_no_longer_than_it_was_told(place: Place) -> None:
    node = place.serve(0)
    engine = place.join(place.cfg(wait_s=2.0))
    engine.wait_ready()
    node.node.close()
    with pytest.raises(RolloutError, match=r"no engine is left, and none has come within placement.wait_s = 2 s"):
        sample(engine)
    with pytest.raises(RolloutError, match="no engine is left"):
        engine.present()


def test_fewer_nodes_than_promised_are_counted(place: Place) -> None:
    place.serve(0)
    other = place.cfg().model_copy(update={"rollout": place.cfg().rollout.model_copy(update={"deterministic": False})})
    place.serve(2, other)
    silent = place.serve(1)
    engine = place.join(place.cfg(nodes=2, wait_s=3.0))
    client = RouterClient(router_file(place.run_dir))
    place.stack.callback(client.close)
    wait_for(lambda: "a run has come" in silent.said)  # the router adds the node some time after its answer
    wait_for(lambda: 1 in [node.record.engines.node for node in client.nodes()])
    silent.node.agent.close()  # the node vanishes without a message
    silent.received.append(signal.SIGTERM)
    wait_for(lambda: any(not node.healthy for node in client.nodes()))
    with pytest.raises(EngineStartError) as caught:
        engine.wait_ready()
    said = str(caught.value)
    assert "1 of 2 engine nodes (placement.nodes) are ready after placement.wait_s = 3 s" in said
    assert "node 0 (" in said and ": ready" in said
    assert re.search(r"node 1 \(.*\): no sign of life", said)
    assert "of another configuration: rollout.deterministic is False, the run has True" in said


def test_a_node_ends_when_there_has_been_no_run_for_too_long(place: Place) -> None:
    node = place.serve(0, place.cfg(away_s=8.0))
    engine = place.join(place.cfg())
    engine.wait_ready()
    wait_for(lambda: "a run has come" in node.said)
    time.sleep(8.5)
    assert node.why is None
    engine.close()
    assert node.ends() == Reason.NO_RUN


def test_an_earlier_run_s_last_word_ends_no_node(place: Place) -> None:
    former = place.serve(1)
    earlier = place.join(place.cfg())
    earlier.wait_ready()
    left = router_file(place.run_dir).read_text()
    earlier.pool.end_of_run()
    earlier.close()
    assert former.ends() == Reason.RUN_IS_OVER
    write_privately(router_file(place.run_dir), left)
    node = place.serve(0)
    place.join(place.cfg()).wait_ready()
    assert node.why is None


@pytest.mark.parametrize(("number", "why"), [(signal.SIGUSR1, Reason.PREEMPTED), (signal.SIGTERM, signal.SIGTERM)])
def test_a_warned_node_stays_until_the_run_has_saved(number: int, why: object, place: Place) -> None:
    node = place.serve(0)
    engine = place.join(place.cfg())
    engine.wait_ready()
    wait_for(lambda: "a run has come" in node.said)
    node.received.append(number)
    if why == Reason.PREEMPTED:
        time.sleep(1.0)
        assert node.why is None and sample(engine) == 40
        engine.close()
    assert node.ends() == why


def test_an_engine_that_dies_without_a_run_ends_its_node(place: Place) -> None:
    node = place.serve(0)
    kill_engine_at(node.node.record.engines.urls[0])
    assert "an engine has ended, and there is no run" in str(node.ends())


def test_an_engine_over_two_nodes_comes_goes_and_comes_back_with_both(place: Place) -> None:
    cfg, said, ends = place.cfg(nodes=2, size=2), list[str](), list[object]()
    received: list[list[int]] = [[], [], []]

    def begin(number: int, signals: list[int]) -> threading.Thread:
        def serve() -> None:
            with contextlib.closing(EngineNode(cfg, place.run_dir, Home(number), CPU, signals, said.append)) as node:
                ends.append(node.serve())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        return thread

    nodes = [begin(1, received[1]), begin(0, received[0])]
    try:
        engine = place.join(cfg)
        client = RouterClient(router_file(place.run_dir))
        place.stack.callback(client.close)
        engine.wait_ready()
        (url,) = engine.urls
        assert sample(engine) == 40
        first = {node.record.engines.node: node.record for node in client.nodes()}
        assert len({record.rendezvous for record in first.values()}) == 1
        kill_engine_at(first[1].engines.urls[0])
        wait_for(lambda: sample(engine) == 40 and place.given == [url])
        restarts = engine.pool.restarts.made
        assert restarts == 1 and engine.urls == (url,), "both parts were started again, where they were"
        received[1].append(signal.SIGTERM)
        nodes[0].join(30)
        assert ends == [signal.SIGTERM]
        nodes.append(begin(1, received[2]))
        wait_for(lambda: sample(engine) == 40 and engine.urls and engine.urls != (url,))
        assert len(engine.urls) == 1 and place.given == [url, *engine.urls]
        assert any("and 1 more" in line and "has left" in line for line in place.told)
        again = {node.record.engines.node: node.record for node in client.nodes()}
        assert again[1].rendezvous != first[1].rendezvous
        engine.pool.end_of_run()
        for node in nodes:
            node.join(30)
        assert ends == [signal.SIGTERM, Reason.RUN_IS_OVER, Reason.RUN_IS_OVER]
    finally:
        for signals in received:
            signals.append(signal.SIGTERM)
        for node in nodes:
            node.join(30)


def test_parts_of_an_engine_are_told_where_they_meet(place: Place, tmp_path: Path) -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs sglang")
    rollout, machine = RolloutConfig(tensor=4), Machine(1, 0, gpus=2)
    for number in range(2):
        part = Part(2, number, "127.0.0.1:2345")
        spec = ServerSpec(
            rollout, str(place.model), "bfloat16", 8000, 0, 7, machine, tmp_path, host="127.0.0.1", part=part
        )
        launch = sglang_launch(spec)
        line = " ".join(launch.command)
        assert "--tp-size 4 --random-seed 7 " in line
        assert f"--nnodes 2 --node-rank {number} --dist-init-addr 127.0.0.1:2345" in line
        assert "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE" not in launch.env
        assert launch.env["GLOO_SOCKET_IFNAME"] == "lo" and launch.env["CUDA_VISIBLE_DEVICES"] == "0,1"


@contextlib.contextmanager
def router(answers: dict[str, object], key: str = KEY) -> Iterator[str]:
    """A server that answers as sglang-router does about itself."""
    routes = {path: lambda body, answer=answer: answer for path, answer in answers.items()}
    with Server(0, key, routes) as server:
        yield f"http://127.0.0.1:{server.port}"


def at_router(place: Place, url: str, key: str = KEY) -> Engine:
    file = place.folder / "key"
    write_privately(file, key)
    cfg = RolloutConfig(urls=(url,), api_key_file=str(file), startup_timeout_s=5.0)
    return start_engine(cfg, str(place.model), "float32", place.folder)


@pytest.mark.parametrize("form", ["workers", "urls"])
def test_engines_behind_a_router_are_used_themselves(form: str, place: Place, tmp_path: Path) -> None:
    own = RolloutConfig(engine="transformers", servers=1)
    with start_engine(own, str(place.model), "float32", tmp_path) as real:
        real.wait_ready()
        key = real.pool.access.api_key
        assert key is not None
        said = {"/workers": {"workers": [{"url": f"{real.urls[0]}/", "is_healthy": True}]}}
        if form == "urls":
            said = {"/list_workers": {"urls": list(real.urls)}}
        with router(said, key) as url, at_router(place, url, key) as engine:
            engine.wait_ready()
            assert engine.urls == real.urls


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"workers": []}, "is a router without engines"),
        ({"workers": [{"url": "file:///etc/passwd"}]}, "names 'file:///etc/passwd', which is not an address"),
        ({"workers": [{"url": "http://a:1"}, {"url": "http://a:1/"}]}, "http://a:1: there twice"),
    ],
)
def test_what_a_router_says_is_not_believed(answer: object, says: str, place: Place) -> None:
    with router({"/workers": answer}) as url, pytest.raises(EngineStartError, match=says):
        at_router(place, url)


def test_an_engine_that_does_not_answer_is_named_with_its_router(place: Place) -> None:
    silent = f"http://127.0.0.1:{free_port()}"
    with router({"/workers": {"workers": [{"url": silent}]}}) as url, at_router(place, url) as engine:
        with pytest.raises(EngineStartError, match=f"engine {silent} did not answer .*behind the router {url} "):
            engine.wait_ready()


def test_an_address_that_does_not_answer_is_asked_once(place: Place) -> None:
    with listen("127.0.0.1", port := free_port()) as listener:  # accepts connections and never answers
        at_router(place, f"http://127.0.0.1:{port}").close()
        listener.settimeout(0.2)
        listener.accept()[0].close()
        with pytest.raises(TimeoutError):
            listener.accept()


def test_a_router_that_came_late_is_refused_as_an_engine(place: Place) -> None:
    answers: dict[str, object] = {}
    with router(answers) as url, at_router(place, url) as engine:
        assert engine.urls == (url,)
    late = {"/workers": {"workers": [{"url": "http://a:1"}]}}
    with router(late) as url:
        access = Access(KEY)
        with pytest.raises(EngineStartError, match=f"{url} is a router .* with 1 engines behind it"):
            cfg = RolloutConfig(startup_timeout_s=5.0)
            check_server(url, access, cfg, str(place.model), "llama", "float32", outlives=True)
