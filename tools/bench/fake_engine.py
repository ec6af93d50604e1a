"""An engine without a model, for benchmarks of its clients: `fake_engine.py PORT_FILE TOKENS [VOCAB]`.

Every response has TOKENS random tokens. The answers have SGLang's format and are created before the first request. The
server listens on all of 127.0.0.0/8, so that one process can stand for many engines.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DIFFERENT = 8  # number of different responses
COUNT = itertools.count()
DONE = {"success": True, "message": "Success"}
ANSWERS: dict[str, Any] = {
    "model_info": {"model_path": "fake", "model_type": "llama", "weight_version": "0"},
    "server_info": {"enable_deterministic_inference": True, "skip_tokenizer_init": True},
}


def single(value: float) -> float:
    """Rounds to float32: SGLang writes float32 values with the digits of a float64."""
    return struct.unpack("f", struct.pack("f", value))[0]


def responses(tokens: int, vocab: int) -> list[bytes]:
    rng = random.Random(1)
    encoded = []
    for _ in range(DIFFERENT):
        ids = [rng.randrange(vocab) for _ in range(tokens)]
        pairs = [[single(-3 * rng.random() ** 2), token, None] for token in ids]
        meta = {
            "finish_reason": {"type": "length", "length": tokens},
            "prompt_tokens": 256,
            "weight_version": "0",
            "output_token_logprobs": pairs,
            "completion_tokens": tokens,
        }
        answer = {"text": "", "output_ids": ids, "meta_info": meta}
        encoded.append(json.dumps(answer, separators=(",", ":")).encode())
    return encoded


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    samples: list[bytes] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        path = self.path.strip("/").partition("?")[0]
        if path == "generate":
            self.answer([self.samples[next(COUNT) % DIFFERENT]])
        else:
            self.answer([json.dumps(ANSWERS.get(path, DONE)).encode()])

    do_GET = do_POST

    def answer(self, parts: list[bytes]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(sum(map(len, parts))))
        self.end_headers()
        self.wfile.writelines(parts)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 2048


def main() -> None:
    tokens, vocab = int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 151_000
    Handler.samples = responses(tokens, vocab)
    server = Server(("0.0.0.0", 0), Handler)
    partial = Path(sys.argv[1] + ".partial")
    partial.write_text(str(server.server_port))
    partial.rename(sys.argv[1])
    server.serve_forever()


if __name__ == "__main__":
    main()
