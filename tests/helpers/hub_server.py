"""A Hugging Face hub on loopback: the HTTP API that an upload needs, with git LFS for weights."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_the_test"


class Hub:
    """The hub server; use it as a context manager. files: committed contents by path; created: bodies of the requests
    to create a repository"""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.large: dict[str, bytes] = {}  # contents of LFS files by SHA-256

    @property
    def env(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}

    def __enter__(self) -> Hub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self._reply(hub.answer)

            def do_PUT(self) -> None:
                self._reply(hub.store)

            def _reply(self, make: Any) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}" or self.command == "PUT"
                code, answer = make(self.path, body) if is_known else (401, {"error": "Invalid user token."})
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def store(self, path: str, body: bytes) -> tuple[int, Any]:
        self.large[path.rpartition("/")[2]] = body
        return 200, {}

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.url}/me/tiny"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/models/me/tiny/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            return 200, {"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]}
        if path == "/me/tiny.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            return 200, {
                "transfer": "basic",
                "objects": [{**o, "actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}"}}} for o in objects],
            }
        if path == "/api/models/me/tiny/commit/main":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.large[value["oid"]]
            return 200, {"commitUrl": f"{self.url}/me/tiny/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None}
        return 404, {"error": f"no such page: {path}"}
