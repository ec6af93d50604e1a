"""`echo_engine.py` without slow imports, for tests that start and stop many engines.

MRL_ENGINE_KEY=... python tests/helpers/light_engine.py MODEL_DIR HOST PORT
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.inference.launch import Launch, ServerSpec

KEY = "MRL_ENGINE_KEY"


def light_launch(spec: ServerSpec) -> Launch:
    from mrl.inference.launch import Launch, environment

    command = [sys.executable, "-S", str(Path(__file__)), spec.model_path, spec.host, str(spec.port)]
    return Launch(command, environment() | {KEY: spec.api_key or ""})


def sample(prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
    tokens = prompt[::-1][: params["max_new_tokens"]]
    finish = {"type": "stop" if len(tokens) < params["max_new_tokens"] else "length"}
    meta = {"finish_reason": finish, "prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
    log_probs = [[0.0, token, None] for token in tokens]
    spans = [{"version": "0", "start": 0, "end": len(tokens)}]
    meta |= {"weight_version": "0", "weight_versions": spans, "output_token_logprobs": log_probs}
    return {"output_ids": tokens, "meta_info": meta}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if self.headers.get("Authorization") != f"Bearer {os.environ[KEY]}":
            return self.reply(401, {})
        self.reply(200, self.answer(body))

    def answer(self, body: dict[str, Any]) -> Any:
        if self.path == "/generate":
            return sample(body["input_ids"], body["sampling_params"])
        kind = json.loads(Path(sys.argv[1], "config.json").read_text())["model_type"]
        info = {"model_path": sys.argv[1], "model_type": kind, "weight_version": "0"}
        return {"success": True, "enable_deterministic_inference": True} | info

    def reply(self, status: int, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer((sys.argv[2], int(sys.argv[3])), Handler).serve_forever()
