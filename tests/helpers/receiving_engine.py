"""Engines without a model, in threads of this process, that receive weights by gloo broadcasts as SGLang does.

`python -m tests.helpers.receiving_engine FILE COUNT` writes the addresses of COUNT engines to FILE and serves.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.files import write_atomically
from mrl.inference.serving import BadRequest
from mrl.inference.serving import Server as HttpServer

KEY = "sesame"
LIMIT = timedelta(seconds=60)  # a deadlock ends after this time


class ReceivingEngine:
    """An engine that joins groups, receives buckets and leaves groups, one request at a time, as a scheduler does.

    behaviour: ok | refuses | dies. A change takes effect at the second bucket after it was set; a dead engine answers
    no request.
    """

    def __init__(self) -> None:
        self.behaviour, self.second = "ok", False
        self.groups: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self.joined = self.received = 0
        self._scheduler = threading.Lock()
        routes: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/init_weights_update_group": self.join,
            "/update_weights_from_distributed": self.receive,
            "/destroy_weights_update_group": self.leave,
            "/behave": self.behave,
            "/state": self.state,
        }
        for name in ("/begin_weight_update", "/end_weight_update", "/flush_cache", "/update_weight_version"):
            routes[name] = lambda body: {"success": True}
        self.http = HttpServer(0, KEY, routes)
        self.url = f"http://127.0.0.1:{self.http.port}"

    def close(self) -> None:
        self.http.close()
        self.groups.clear()

    def behave(self, body: dict[str, Any]) -> Any:
        """Sets the behaviour. `new` imitates a restarted process, which knows no groups."""
        self.behaviour, self.second = body["behaviour"], False
        if self.behaviour == "new":
            self.groups.clear()
            self.tensors.clear()
        return {}

    def state(self, body: dict[str, Any]) -> Any:
        return {"digest": digest(self.tensors), "joined": self.joined, "received": self.received}

    def join(self, body: dict[str, Any]) -> Any:
        with self._scheduler:
            name, address, size = body["group_name"], body["master_address"], body["world_size"]
            store = dist.TCPStore(address, body["master_port"], size, timeout=LIMIT)
            keys = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = LIMIT
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            self.groups[name] = dist.ProcessGroupGloo(keys, body["rank_offset"], size, options)
            self.joined += 1
        return {"success": True}

    def receive(self, body: dict[str, Any]) -> Any:
        with self._scheduler:
            fails, self.second = self.second and self.behaviour in ("refuses", "dies"), True
            if fails and self.behaviour == "refuses":
                self.behaviour = "ok"
                raise BadRequest("out of memory")
            if fails:
                self.groups.clear()
                self.http.close()
                raise SystemExit
            shapes, kinds = body["shapes"], [getattr(torch, name) for name in body["dtypes"]]
            sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            options = dist.BroadcastOptions()
            options.rootRank = 0
            try:
                self.groups[body["group_name"]].broadcast([flat], options).wait()
            except RuntimeError as error:
                raise BadRequest(f"Failed to receive weights: {error}") from error
            for name, part, kind, shape in zip(body["names"], flat.split(sizes), kinds, shapes, strict=True):
                self.tensors[name] = part.view(kind).view(shape)
            self.received += 1
        return {"success": True}

    def leave(self, body: dict[str, Any]) -> Any:
        with self._scheduler:
            if self.groups.pop(body["group_name"], None) is None:
                raise BadRequest("The group to be destroyed does not exist.")
        return {"success": True}


def digest(tensors: dict[str, Tensor]) -> str:
    """Returns a digest of the tensors' names and bytes."""
    made = hashlib.sha256()
    for name in sorted(tensors):
        made.update(name.encode())
        made.update(tensors[name].contiguous().view(torch.uint8).numpy())
    return made.hexdigest()


if __name__ == "__main__":
    write_atomically(Path(sys.argv[1]), " ".join(ReceivingEngine().url for _ in range(int(sys.argv[2]))))
    signal.pause()
