"""Another account of the machine against the engines of a run: no endpoint, no weights, no port, no secret for it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from mrl import ports
from mrl.config.schema import RolloutConfig
from mrl.config.secret_file import read_secret
from mrl.inference import access, membership
from mrl.inference.access import Access, listeners
from mrl.inference.client import EngineClient
from mrl.inference.engine import Engine
from mrl.inference.errors import EngineError, EngineStartError, PortTaken
from mrl.inference.launch import Launch
from mrl.inference.process import EngineProcess
from mrl.inference.start import start_engine
from mrl.ports import free_port
from tests.conftest import TinyModels
from tests.system.agents.test_agent_endpoint import Model
from tests.system.agents.test_agent_endpoint import play as play_harness
from tests.worlds.stranger import REQUESTS, STRANGER, ask, attacks, become_a_stranger, flood

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
as_root = pytest.mark.skipif(os.getuid() != 0, reason="a second account needs root: the others go without the key only")

# What a stranger's process does: it takes the port and writes down what is sent there.
TAKES_THE_PORT = """
import socket, sys
sys.path.insert(0, sys.argv[3])
from tests.worlds.stranger import become_a_stranger
out = open(sys.argv[2], "ab", buffering=0)
become_a_stranger()
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    print("listening", flush=True)
    while True:
        connection, _ = server.accept()
        out.write(b"connection " + connection.recv(1000))
"""


@contextlib.contextmanager
def taken(port: int, heard: Path) -> Iterator[None]:
    command = [sys.executable, "-S", "-c", TAKES_THE_PORT, str(port), str(heard), str(ROOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"listening\n"
            yield
        finally:
            process.kill()


@pytest.fixture(scope="module")
def engine(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    logs = tmp_path_factory.mktemp("logs")
    with start_engine(RolloutConfig(engine="transformers"), str(tiny_models("llama")), "float32", logs) as engine:
        engine.wait_ready()
        yield engine


def in_a_child(action: Any) -> Any:
    """Returns the result of `action`, run by another account in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become_a_stranger()
            os.write(write, json.dumps(action()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def try_everything(engine: Engine, foreign: Path, folder: Path) -> dict[str, str]:
    """Each attack's outcome, and the engine as it was."""
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    client, port = engine.pool.client(engine.urls[0]), int(engine.urls[0].rpartition(":")[2])
    before = client.weights_checksum(), client.model_info()
    found: dict[str, str] = in_a_child(
        lambda: {name: attack(port) for name, attack in attacks(str(foreign), str(folder), []).items()}
    )
    assert (client.weights_checksum(), client.model_info()) == before
    assert list(folder.iterdir()) == []
    return found


REFUSED = dict.fromkeys(REQUESTS, "401") | dict.fromkeys(("wrong key", "key of no ascii", "host"), "401")


def test_no_endpoint_of_the_transformers_engine_is_open(
    engine: Engine, tiny_models: TinyModels, tmp_path: Path
) -> None:
    found = try_everything(engine, tiny_models("llama", seed=1), tmp_path / "written")
    assert found == {**found, **REFUSED}
    port = int(engine.urls[0].rpartition(":")[2])
    open_ones = [path for path in ("/model_info", "/server_info", "/health") if ask(port, path, {}, {}) != "401"]
    assert open_ones == []


def test_who_is_refused_is_told_that_the_connection_ends(engine: Engine) -> None:
    """Else a client's next request could go into it, and be lost."""
    answer = httpx.get(f"{engine.urls[0]}/model_info", trust_env=False)
    assert (answer.status_code, answer.headers["connection"]) == (401, "close")


@pytest.mark.engine
def test_of_sglang_only_health_is_open_and_nothing_is_written(
    sglang_engine: Engine, tiny_models: TinyModels, tmp_path: Path
) -> None:
    found = try_everything(sglang_engine, tiny_models("llama", seed=1), tmp_path / "written")
    assert found["key of no ascii"] in ("401", "500")
    assert found == {**found, **REFUSED, **{name: found[name] for name in ("health", "key of no ascii")}}
    (process,) = sglang_engine.pool.processes
    tree = psutil.Process(process.pid).children(recursive=True)
    ports = {(c.laddr.ip, c.status) for p in tree for c in p.net_connections("inet") if c.status == "LISTEN"}
    assert {ip for ip, _ in ports} == {"127.0.0.1"}, "reached from other machines"


def test_a_flood_of_strangers_at_the_transformers_engine_changes_nothing(engine: Engine) -> None:
    client, port = engine.pool.client(engine.urls[0]), int(engine.urls[0].rpartition(":")[2])
    before, result = client.weights_checksum(), list[dict[str, int]]()
    thread = threading.Thread(target=lambda: result.append(in_a_child(lambda: flood(port, 3, idle=1500))))
    thread.start()
    while thread.is_alive():
        assert client.weights_checksum() == before
    thread.join()
    assert result[0]["held"] > 1024 and result[0]["dropped"] > 0 and result[0]["401"] > 0


def test_the_key_is_for_the_engine_s_account_alone(engine: Engine, tiny_models: TinyModels, tmp_path: Path) -> None:
    key = engine.pool.access.api_key
    assert key is not None and len(key) == 64
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]  # none of one that ends
    lines = [" ".join(line) for line in found]
    (process,) = engine.pool.processes
    assert not [line for line in lines if key in line] and key not in process.log.read_text()
    assert key not in repr(engine.pool.access) and key not in repr(vars(engine)) and key not in repr(vars(engine.pool))
    with start_engine(RolloutConfig(engine="transformers"), str(tiny_models("llama")), "float32", tmp_path) as other:
        assert other.pool.access.api_key != key


def test_an_engine_without_a_key_does_not_pass(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Some options of SGLang open a server to everybody."""
    code = (
        "import sys\nfrom http.server import *\n"
        "class H(BaseHTTPRequestHandler):\n    def do_GET(self):\n"
        "        self.send_response(200); self.send_header('Content-Length', '2'); self.end_headers()\n"
        "        self.wfile.write(b'{}')\n"
        "HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()"
    )
    cfg = RolloutConfig(engine="transformers")
    with start_engine(cfg, str(tiny_models("llama")), "float32", tmp_path) as engine:
        (process,) = engine.pool.processes
        process._launch = lambda folder: Launch([sys.executable, "-c", code, str(process._port)], dict(os.environ))
        process.restart()
        with pytest.raises(EngineStartError, match="answers without the run's key .*could change its weights"):
            engine.wait_ready()


@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize(
    ("address", "reached"),
    [("127.0.0.1", True), ("::ffff:127.0.0.1", True), ("0.0.0.0", True), ("::", True), ("127.0.0.2", False)],
)
def test_who_listens_is_seen(address: str, reached: bool, tables: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the kernel, and where that gives no answer read from /proc."""

    def refused(port: int) -> list[Any]:
        raise PermissionError

    monkeypatch.setattr(access, "_ask" if tables else "_read_tables", refused)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, dualstack_ipv6=":" in address) as server:
        found = listeners(server.getsockname()[1])
        own = os.fstat(server.fileno())
        here = [one for one in found if one.inode == str(own.st_ino)]  # another program may have 127.0.0.1's
        assert [one.user for one in here] == ([own.st_uid] if reached else [])
        assert all(one.is_held_by(os.getpid()) for one in here)
    assert listeners(free_port()) == []


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run's engine needs seconds until it listens."""
    monkeypatch.setattr(ports, "PORTS", range(32000, 32100))
    claims: list[socket.socket] = []
    monkeypatch.setattr(ports, "_claims", claims)
    given: list[int] = []
    with pytest.raises(ports.NoFreePort):
        for _ in range(101):
            given.append(free_port())
    for claim in claims:
        claim.close()
    assert len(given) == len(set(given)) > 0


@as_root
def test_a_stranger_on_the_port_is_sent_nothing(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Bound before the engine could be, and after it has died."""
    port, heard = free_port(), tmp_path / "heard"
    sleeper = Launch([sys.executable, "-S", "-c", "import time; time.sleep(60)"], dict(os.environ))
    access = Access("secret", ours=True)
    with taken(port, heard):
        assert [one.user for one in listeners(port)] == [STRANGER]
        process = EngineProcess("engine 0", lambda folder: sleeper, port, tmp_path / "log", access)
        with pytest.raises(PortTaken, match=f"engine 0 .*{port}.* a process of user {STRANGER} .*Nothing was sent"):
            process.wait_ready(30)
        assert process.exit_code() is not None
        client = EngineClient(f"http://127.0.0.1:{port}", 5, access)
        with pytest.raises(EngineError, match=f"/model_info: .*a process of user {STRANGER} listens there"):
            client.model_info()
    assert heard.read_bytes() == b""


def test_another_process_of_this_account_on_the_port_is_not_the_engine(tmp_path: Path) -> None:
    sleeper = Launch([sys.executable, "-S", "-c", "import time; time.sleep(60)"], dict(os.environ))
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = EngineProcess("engine 0", lambda folder: sleeper, server.getsockname()[1], tmp_path / "log")
        with pytest.raises(PortTaken, match="that mrl did not start"):
            process.wait_ready(30)
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("dies", [False, True])
def test_the_engine_s_folder_is_private_and_ends_with_it_and_so_does_its_shared_memory(
    dies: bool, tmp_path: Path
) -> None:
    code = (
        "import mmap, os, time\nfile = open(f'/dev/shm/sglang_loads_{os.getpid()}', 'w+b')\nfile.truncate(4096)\n"
        "held = mmap.mmap(file.fileno(), 4096)\nprint(os.environ['TMPDIR'], file.name, flush=True)\n"
        f"time.sleep({5 if dies else 60}); os._exit(1)"
    )
    launch = Launch([sys.executable, "-S", "-c", code], dict(os.environ))
    process = EngineProcess("engine 0", lambda folder: launch, free_port(), tmp_path / "log")
    try:
        for _ in range(200):
            if (text := (tmp_path / "log").read_text()).endswith("\n"):
                break
            time.sleep(0.05)
        folder, shared = map(Path, text.split())
        assert shared.exists()
        assert folder.stat().st_mode & 0o777 == 0o700
        end = time.monotonic() + 60
        while dies and process.exit_code() is None:
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        process.close()
    assert not folder.exists() and not shared.exists()


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"sesame\n", 0o644, "by other users: run chmod 600"),
        (b"sesame\n", 0o620, "by other users: run chmod 600"),
        (b" \n", 0o600, "is empty"),
        (b"open sesame", 0o600, "one line"),
        (b"\xff\xfe", 0o600, "one line"),
        (b"a\nb", 0o600, "one line"),
        (None, 0o600, "No such file"),
    ],
)
def test_a_key_file_that_is_none(content: bytes | None, mode: int, message: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with pytest.raises(ValueError, match=message) as caught:
        read_secret(str(file))
    assert "\n" not in str(caught.value) and "sesame" not in str(caught.value)


def test_a_pipe_is_no_key_file(tmp_path: Path) -> None:
    """Nobody writes into it: it would be waited for without end."""
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(ValueError, match="key is not a file"):
        read_secret(str(tmp_path / "key"))


def test_a_given_engine_that_hangs_at_start(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes the connection and says nothing, and one that answers a byte at a time."""
    monkeypatch.setattr(membership, "ANSWER_S", 0.6)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as slow:

        def drip() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = slow.accept()
                    connection.sendall(
                        b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\nContent-Type: application/json\r\n\r\n"
                    )
                    threading.Thread(target=drip_bytes, args=(connection,), daemon=True).start()

        def drip_bytes(connection: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        for server in (silent, slow):
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            cfg = RolloutConfig(urls=(url,), startup_timeout_s=0.6)
            with start_engine(cfg, str(tiny_models("llama")), "float32", tmp_path) as engine:
                started = time.monotonic()
                with pytest.raises(
                    EngineStartError, match=f"{url} did not answer within rollout.startup_timeout_s = 0.6"
                ):
                    engine.wait_ready()
                assert time.monotonic() - started < 10


@pytest.mark.slow
def test_a_run_whose_ports_are_hammered_ends_with_the_weights_of_one_left_alone(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    """For a full minute, with either engine: tools/hammer.py."""
    from tools.hammer import measure

    found = measure(tmp_path, tiny_models("llama"), tiny_models("llama", seed=1), "transformers", steps=2)
    assert found["differences"] == [] and found["written"] == []
    assert sum(found["attacks"]["weights"].values()) >= 3
    outcomes = set(found["attacks"]["weights"]) | set(found["attacks"]["host"])
    assert {outcome for outcome in outcomes if outcome.isdigit()} <= {"401"}, "or the connection ended, with the engine"


TALKS = """
import json, time, urllib.request

def talks(ctx, prompt):
    open(ctx.row["port"], "w").write(ctx.endpoint.url)
    messages = []
    for number in range(ctx.row["turns"]):
        messages.append({"role": "user", "content": str(number)})
        request = urllib.request.Request(
            ctx.endpoint.url + "/chat/completions",
            json.dumps({"messages": messages}).encode(),
            {"Authorization": f"Bearer {ctx.endpoint.key}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
        time.sleep(0.1)
    return 1.0
"""


def test_strangers_at_an_agent_s_endpoint_change_nothing(tmp_path: Path) -> None:
    """More idle connections than select takes, slow bytes, large bodies and wrong keys, for as long as it is played."""
    (tmp_path / "talks.py").write_text(TALKS)

    def played(name: str, turns: int) -> list[Any]:
        row = {"port": str(tmp_path / name), "turns": turns}
        limits = {"retries": 0, "max_turns": 100, "max_tokens": 10_000, "step_timeout_s": 30, "workers": 1}
        return play_harness(tmp_path / "talks.py", "talks", Model(), count=2, row=row, **limits)

    alone = played("alone", 45)  # longer than the flood: at its end the endpoint is still there
    result = list[dict[str, int]]()

    def hammer() -> None:
        while not (tmp_path / "hammered").exists() or not (url := (tmp_path / "hammered").read_text()):
            time.sleep(0.02)
        port = int(url.rpartition(":")[2].partition("/")[0])
        result.append(in_a_child(lambda: flood(port, 3, idle=1500)))

    thread = threading.Thread(target=hammer)
    thread.start()
    hammered = played("hammered", 45)
    thread.join(60)
    assert [sample.response_ids.tolist() for sample in hammered] == [sample.response_ids.tolist() for sample in alone]
    assert [sample.environment for sample in hammered] == [{"score": 1.0}] * 2
    [found] = result
    assert found["held"] > 1024 and found["dropped"] > 400, "strangers share 1000 connections"
    assert found["401"] > 0
    assert set(found) <= {"held", "dropped", "401", "400", "closed", "ConnectionResetError", "BrokenPipeError"}
