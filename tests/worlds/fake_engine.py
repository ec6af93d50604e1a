"""An engine that answers the sync protocol without a model. Usage: fake_engine.py PORT_FILE BEHAVIOUR

BEHAVIOUR: ok | no_session | refuses_begin | refuses_group | error_500 | dies | hangs | busy | busy_at_first |
generate_hangs. Updates fail at the second one; generate_hangs affects requests of a rollout. The engine claims to serve
a llama on two tensor-parallel ranks, and answers every prompt with the same few tokens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BEHAVIOUR = sys.argv[2]
calls: list[str] = []
handles: list[int] = []  # number of handles in each update from tensors: one per process
version = ["0"]  # the version that the trainer set last


def sample(prompt: list[int]) -> dict[str, Any]:
    tokens = [70, 71, 72, 73]
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, token, None] for token in tokens]}
    return {"output_ids": tokens, "meta_info": meta | {"weight_version": version[0], "prompt_tokens": len(prompt)}}


def generate(body: dict[str, Any]) -> tuple[int, Any]:
    if "rid" not in body:  # the warm-up request before the first use of a server
        return 200, sample(body["input_ids"])
    if BEHAVIOUR == "generate_hangs":
        calls.append(BEHAVIOUR)
        time.sleep(600)
    return 200, sample(body["input_ids"])


def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    if path == "calls":
        return 200, {"calls": calls, "handles": handles}
    if path == "model_info":
        return 200, {"model_path": "fake", "model_type": "llama", "weight_version": "0"}
    if path == "server_info":
        return 200, {"enable_deterministic_inference": True, "skip_tokenizer_init": True, "tp_size": 2}
    calls.append(path)
    update = path in ("update_weights_from_tensor", "update_weights_from_distributed")
    if path == "update_weights_from_tensor":
        handles.append(len(body["serialized_named_tensors"]))
    second = update and calls.count(path) == 2
    if path == "begin_weight_update" and BEHAVIOUR == "refuses_begin":
        return 200, {"success": False, "message": "a weight-update session is already open"}
    if path in ("begin_weight_update", "end_weight_update") and BEHAVIOUR == "no_session":
        return 404, {"detail": "Not Found"}
    if path == "init_weights_update_group" and BEHAVIOUR == "refuses_group":
        return 400, {"success": False, "message": "no group for you"}
    if path == "flush_cache" and (BEHAVIOUR == "busy" or BEHAVIOUR == "busy_at_first" and calls.count(path) < 3):
        return 400, {"message": "Flush cache failed, requests are running"}
    if path == "update_weight_version":
        version[0] = body["new_version"]
    if second and BEHAVIOUR == "error_500":
        return 500, {"error": {"message": "internal: out of memory"}}
    if second and BEHAVIOUR == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if second and BEHAVIOUR == "hangs":
        time.sleep(600)
    if path == "generate":
        return generate(body)
    return 200, {"success": True, "message": "Success"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        status, reply = answer(self.path.strip("/").partition("?")[0], json.loads(sent) if sent else {})
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
partial = Path(sys.argv[1] + ".partial")
partial.write_text(str(server.server_port))
partial.rename(sys.argv[1])
server.serve_forever()
