"""`mrl preflight --nodes`: nodes that are missing, faulty or slow."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl import cli
from mrl.launcher import ElasticJob, NodeRank
from mrl.launcher.elastic import node_rendezvous
from mrl.ports import free_port
from mrl.preflight import nodes
from mrl.preflight.finding import Finding
from mrl.preflight.network import NetworkBandwidth, rounds, slow_nodes
from mrl.preflight.nodes import NodeRendezvous, check_nodes
from tests.conftest import TinyModels
from tests.helpers import zygote
from tests.helpers.train_tools import ROOT, write_config

LIMIT_S = 120.0


def test_two_launchers_look_at_each_other(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Two launchers act as two machines: each reports its own findings, and both report those of the network."""
    config = write_config(tmp_path, tiny_models("qwen2"), actor={"parallel": {"tensor": 2}}, run={"nproc": 1})
    place = ["--nodes=2", f"--head=127.0.0.1:{free_port()}", "--names=n1,n2", "--mib=1", "--at-least=1e9", "--json"]
    command = [sys.executable, "-m", "mrl", "preflight", str(config), *place]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [zygote.start([*command, f"--node={number}"], cwd=ROOT, env=env, **pipes) for number in range(2)]
    told = [json.loads(each.communicate(timeout=LIMIT_S)[0]) for each in started]
    assert [each["exit_code"] for each in told] == [1, 1], "no network is that fast"
    for each in told:
        found = {(finding["check"], finding["verdict"]): finding["text"] for finding in each["findings"]}
        assert found["nodes", "ok"] == "all 2 have joined"
        assert "all-reduce of 1 MiB over 2 ranks on 2 nodes by gloo" in found["network", "ok"]
        slow = [finding["text"] for finding in each["findings"] if finding["verdict"] == "problem"]
        assert [text.partition(" is slow")[0] for text in slow] == ["node 0 (n1)", "node 1 (n2)"]
    first, second = ({finding["check"] for finding in each["findings"]} for each in told)
    assert first - second >= {"data", "weights", "run directory"}, "what all nodes see is looked at once"


def meet(found: Sequence[Sequence[Finding]], count: int, missing: Sequence[int] = ()) -> list[list[Finding]]:
    """Returns each present node's findings about the others."""
    head = f"127.0.0.1:{free_port()}"
    here = [number for number in range(count) if number not in missing]

    def look(number: int) -> list[Finding]:
        rendezvous = NodeRendezvous(NodeRank(number, count, head), ["n1", "n2", "n3"], meet_s=1.5)
        result = check_nodes(rendezvous, found[number], 1, None)
        rendezvous.leave(1.0)
        return result

    with ThreadPoolExecutor(len(here)) as pool:
        return list(pool.map(look, here))


@pytest.mark.slow
def test_what_ranks_print_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output of ranks does not disturb the measurement. NCCL prints its version on stdout, and with NCCL_DEBUG=INFO
    more than a pipe holds."""
    noise = "import os\nif 'LOCAL_RANK' in os.environ:\n    print('NCCL version 2.27.3+cuda12.9\\n' * 9000)\n"
    (tmp_path / "sitecustomize.py").write_text(noise)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for [here, network] in meet([[]] * 2, 2):
        assert (here.text, network.verdict) == ("all 2 have joined", "ok")
        assert "all-reduce of 1 MiB over 2 ranks on 2 nodes by gloo" in network.text


def test_nodes_that_do_not_come_are_named() -> None:
    for finding in chain(*meet([[]] * 3, 3, missing=[1])):
        assert finding.verdict == "problem" and finding.text == "node 1 (n2) did not join within 1.5 s"
    [finding] = check_nodes(NodeRendezvous(NodeRank(0, 2, "10.255.255.1:17399"), [], meet_s=1.0), [], 1, None)
    assert "node 0 cannot listen at 10.255.255.1:17399 (Cannot assign requested address)" in finding.text
    [[finding]] = meet([[]] * 2, 2, missing=[0])
    assert finding.verdict == "problem" and "node 0 (n1) does not answer at 127.0.0.1:" in finding.text


def test_what_is_wrong_elsewhere_is_said_everywhere_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.subprocess, "Popen", None)
    wrong = [Finding("temporary files", "problem", "TMPDIR is nowhere"), Finding("GPUs", "ok", "fine")]
    first, second, third = meet([[], wrong, []], 3)
    assert [str(finding) for finding in first] == ["node 1 (n2): TMPDIR is nowhere"] == [str(f) for f in third]
    assert second == [], "its own table has it"


def test_a_node_that_lacks_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([8, 8, 7])
    monkeypatch.setattr(nodes.platform, "gpu_count", lambda: next(counts))
    monkeypatch.setattr(nodes.subprocess, "Popen", None)
    for [finding] in meet([[]] * 3, 3):
        assert re.fullmatch(r"node \d \(n\d\) has 7 GPUs, and other nodes have 8", finding.text)


def test_a_node_is_slow_that_is_so_with_both_neighbours() -> None:
    speeds = {("a", "b"): 40.0, ("b", "c"): 4.0, ("c", "d"): 5.0, ("d", "a"): 42.0}
    pairs = tuple((one, other, speed, 3) for (one, other), speed in speeds.items())
    seen = NetworkBandwidth("nccl", 32, 4, 256, 4.0, pairs)
    [slow] = slow_nodes(seen, None)
    assert slow.startswith("c is slow") and "5.00 GB/s at best (GPU 3 of the node)" in slow
    assert len(slow_nodes(seen, 100.0)) == 4
    assert slow_nodes(replace(seen, pairs=pairs[:1]), None) == [], "of two nodes none is the slower one"


@pytest.mark.parametrize("count", range(1, 8))
def test_every_node_has_two_neighbours_and_one_at_a_time(count: int) -> None:
    made = rounds(count)
    assert all(len(set(chain(*edges))) == 2 * len(edges) for edges in made)
    edges = [frozenset(edge) for edge in chain(*made)]
    assert len(set(edges)) == len(edges) == (count if count > 2 else count - 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes=2", "--node=0"], "go together"),
        (["--nodes=2", "--node=0", "--head=a:99999"], "must be HOST:PORT"),
        (["--nodes=2", "--node=0", "--head=a:1", "--ranks=8"], "--ranks checks this machine alone"),
        (["--gpu=h900"], "expected one of a100-80g"),
    ],
)
def test_a_place_that_is_none_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["preflight", "config.yaml", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_gloo_listens_where_the_head_sees_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo listens on the interface of the address at which the head reaches the node, or on the one that the user
    names. By default it would use the host name's address, which is a loopback address in Debian's /etc/hosts."""
    ib0 = SimpleNamespace(family=socket.AF_INET, address="192.0.2.7")
    monkeypatch.setattr("mrl.ports.psutil.net_if_addrs", lambda: {"ib0": [ib0]})
    monkeypatch.setattr("mrl.ports.address_towards", lambda host: {"node17": "192.0.2.7"}[host])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    job = ElasticJob("torchrun", ["mrl"], 1, max_restarts=0, save_s=None, limits={}, ft_config=None)
    for wanted in ("ib0", "eth1"):
        _, env = node_rendezvous(job, NodeRank(1, 2, "node17:29500"), "folder")
        assert env["GLOO_SOCKET_IFNAME"] == wanted
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
