"""Checks the nodes of a run before it starts: whether all come, what each reports, and how fast their network is.

`mrl preflight CONFIG --nodes N --node K --head HOST:PORT` runs on each node. The nodes exchange their findings in a
store at the head. Each node then starts one rank a GPU (one without GPUs) that measures the network. Every wait has a
timeout.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrl import platform, ports
from mrl.launcher import NodeRank, signals
from mrl.preflight import network
from mrl.preflight.finding import Finding, problems

MEET_S = 120.0  # timeout of the rendezvous; the first import of torch from a shared disk is slow
MEASURE_S = 180.0
SAY_S = 5.0  # timeout of the reports; a scheduler ends all nodes with the first one
_POLL_S = 0.05


class NodesMissing(RuntimeError):
    """Nodes that did not come in time; the message names them."""


@dataclass
class NodeRendezvous:
    """Rendezvous of all nodes; this node is `node`. names: node names for messages"""

    node: NodeRank
    names: Sequence[str]
    meet_s: float = MEET_S
    _store: Any = field(init=False, default=None)

    def exchange(self, what: str, own: object, timeout_s: float) -> list[Any]:
        """Returns every node's `own` (plain data) in the order of the nodes. Raises NodesMissing."""
        try:
            self._join(timeout_s).set(f"{what} {self.node.number}", json.dumps(own))
            end = time.monotonic() + timeout_s
            keys = [f"{what} {number}" for number in range(self.node.count)]
            while missing := [number for number, key in enumerate(keys) if not self._store.check([key])]:
                if time.monotonic() > end:
                    raise NodesMissing(f"{', '.join(map(self.name, missing))} did not join within {timeout_s:g} s")
                time.sleep(_POLL_S)
            return [json.loads(self._store.get(key)) for key in keys]
        except dist.DistError as error:
            reason = str(error).partition("\n")[0]
            raise NodesMissing(f"{self.name(0)} does not answer at {self.node.head}: {reason}") from None
        except OSError as error:
            why = error.strerror or error
            text = f"{self.name(0)} cannot listen at {self.node.head} ({why})"
            raise NodesMissing(f"{text}: set --head to an address of this node and a free port") from None

    def leave(self, timeout_s: float = SAY_S) -> None:
        """Leaves the rendezvous once this node has reported.

        Other nodes leave after the head, and the head after all have reported, so that a scheduler that ends all nodes
        with the first one cuts off no report.
        """
        if self._store is None:
            return
        awaited = ["said 0"] if self.node.number else [f"said {number}" for number in range(self.node.count)]
        end = time.monotonic() + timeout_s
        with contextlib.suppress(dist.DistError):
            self._store.set(f"said {self.node.number}", "")
            while not all(self._store.check([key]) for key in awaited) and time.monotonic() < end:
                time.sleep(_POLL_S)
        if self.node.number == 0:
            time.sleep(4 * _POLL_S)  # the head serves the others' last look

    def name(self, number: int) -> str:
        return f"node {number} ({self.names[number]})" if number < len(self.names) else f"node {number}"

    def _join(self, timeout_s: float) -> Any:
        if self._store is None:
            host, _, port = self.node.head.rpartition(":")
            limit = timedelta(seconds=timeout_s)
            if self.node.number == 0:
                listening = ports.listen(host, int(port)).detach()
                self._store = dist.TCPStore(
                    host, int(port), is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listening
                )
            else:
                self._store = dist.TCPStore(host, int(port), timeout=limit)
        return self._store


def check_nodes(
    rendezvous: NodeRendezvous, found: Sequence[Finding], mib: int | None, at_least: float | None
) -> list[Finding]:
    """Returns problems of other nodes, or the network's speed; equal on all nodes but for a node's own problems.

    found: this node's findings
    """
    node = rendezvous.node
    own = [str(finding) for finding in problems(found)]
    try:
        reports = rendezvous.exchange("found", {"problems": own, "gpus": platform.gpu_count()}, rendezvous.meet_s)
        others = [(number, text) for number, each in enumerate(reports) for text in each["problems"]]
        if others:
            told = [(number, text) for number, text in others if number != node.number]
            return [Finding("nodes", "problem", f"{rendezvous.name(number)}: {text}") for number, text in told]
        gpus = [each["gpus"] for each in reports]
        few = [f"{rendezvous.name(n)} has {count} GPUs" for n, count in enumerate(gpus) if count < max(gpus)]
        if few:
            text = f"{', '.join(few)}, and other nodes have {max(gpus)}"
            return [Finding("nodes", "problem", text, "check nvidia-smi and CUDA_VISIBLE_DEVICES there")]
        host = node.head.rpartition(":")[0]
        port, *_ = rendezvous.exchange("port", ports.free_port(host) if node.number == 0 else None, rendezvous.meet_s)
        result = _measured(rendezvous, f"{host}:{port}", mib)
        results = rendezvous.exchange("measured", result, MEASURE_S)
    except (NodesMissing, ports.NoFreePort) as error:
        remedy = "read its own output, ping it, and check its interfaces, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return [Finding("nodes", "problem", str(error), remedy)]
    return [Finding("nodes", "ok", f"all {node.count} have joined"), *_judged(rendezvous, results, at_least)]


def _measured(rendezvous: NodeRendezvous, head: str, mib: int | None) -> dict[str, Any]:
    """Returns {"network": rank 0's result, on node 0 alone, "error": this node's error, "" if none}."""
    node, local = rendezvous.node, platform.gpu_count() or 1
    host, _, port = head.rpartition(":")
    env = os.environ | {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": str(node.count * local)}
    env |= {"LOCAL_WORLD_SIZE": str(local), network.NAME_VARIABLE: rendezvous.name(node.number)}
    env |= ports.gloo_towards(host)
    with tempfile.TemporaryDirectory(prefix="mrl-network-") as folder:
        made, ranks = Path(folder), []
        for number in range(local):
            mine = env | {"RANK": str(node.number * local + number), "LOCAL_RANK": str(number)}
            options = [str(mib or network.default_mib()), str(made / f"{number}.json")]
            command = [sys.executable, "-m", "mrl.preflight.network", *options]
            with (made / f"{number}.log").open("wb") as log:  # nobody reads a pipe while ranks wait for each other
                ranks.append(signals.start_program(command, mine, log, log))
        error = next((text for text in _errors(ranks, made) if text), "")
        is_first = node.number == 0 and not error
        return {"network": json.loads((made / "0.json").read_text()) if is_first else None, "error": error}


def _errors(ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> Iterator[str]:
    """Yields each rank's error, "" without one, and kills all ranks at the end."""
    end = time.monotonic() + MEASURE_S
    try:
        for number, rank in enumerate(ranks):
            try:
                code = rank.wait(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                yield f"its rank {number} did not finish the all-reduces within {MEASURE_S:g} s"
                continue
            lines = (folder / f"{number}.log").read_text(errors="replace").splitlines()
            said = [line for line in lines if line.startswith("mrl: ")] or lines[-1:]
            yield (said[0] if said else f"exit code {code}") if code else ""
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _judged(rendezvous: NodeRendezvous, results: Sequence[dict[str, Any]], at_least: float | None) -> Iterator[Finding]:
    failed = [(number, each["error"]) for number, each in enumerate(results) if each["error"]]
    for number, text in failed:
        yield Finding("network", "problem", f"{rendezvous.name(number)}: {text.removeprefix('mrl: ')}")
    if failed:
        return
    found = network.NetworkBandwidth(**results[0]["network"])
    is_steady = found.backend == "nccl" or at_least is not None  # on CPUs, other programs disturb the measurement
    for text in network.slow_nodes(found, at_least):
        remedy = "exclude the node, or check its cables and NICs with NCCL_DEBUG=INFO"
        yield Finding("network", "problem" if is_steady else "warning", text, remedy)
    yield Finding("network", "ok", network.words(found))
