"""A toy engine that answers each prompt with its tokens in reverse order. It follows docs/extending.md.

MRL_ENGINE_KEY=... python tests/helpers/echo_engine.py MODEL_DIR PORT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from mrl.families import read_hf_config  # noqa: E402
from mrl.inference import protocol  # noqa: E402
from mrl.inference.launch import Launch, ServerSpec, environment  # noqa: E402
from mrl.inference.serving import KEY_VARIABLE, BadRequest, serve  # noqa: E402


def echo_launch(spec: ServerSpec) -> Launch:
    command = [sys.executable, str(Path(__file__)), spec.model_path, str(spec.port)]
    return Launch(command, environment() | {KEY_VARIABLE: spec.api_key or ""})


class Echo:
    def __init__(self, model_path: str) -> None:
        self.model_path, self.version = model_path, "default"
        self.routes = {
            protocol.MODEL_INFO.path: self.model_info,
            protocol.SERVER_INFO.path: lambda body: {"enable_deterministic_inference": True},
            protocol.GENERATE.path: self.generate,
            protocol.ABORT.path: lambda body: {"success": True},
            protocol.FLUSH_CACHE.path: lambda body: {"success": True},
            protocol.UPDATE_FROM_DISK.path: self.load,
            protocol.UPDATE_VERSION.path: self.rename,
        }

    def model_info(self, body: Any) -> Any:
        kind = read_hf_config(self.model_path)["model_type"]
        return {"model_path": self.model_path, "model_type": kind, "weight_version": self.version}

    def generate(self, body: protocol.GenerateBody) -> protocol.Generated:
        prompt = body["input_ids"]
        tokens = prompt[::-1][: body["sampling_params"]["max_new_tokens"]]
        return {
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": "stop" if tokens == prompt[::-1] else "length"},
                "prompt_tokens": len(prompt),
                "completion_tokens": len(tokens),
                "weight_version": self.version,
                "output_token_logprobs": [[0.0, token, None] for token in tokens],
            },
        }

    def load(self, body: protocol.DiskBody) -> Any:
        if not list(Path(body["model_path"]).glob("*.safetensors")):
            raise BadRequest(f"{body['model_path']} has no weights")
        return self.rename({"new_version": body["weight_version"]})

    def rename(self, body: Any) -> Any:
        self.version = body["new_version"]
        return {"success": True}


if __name__ == "__main__":
    serve(int(sys.argv[2]), os.environ.pop(KEY_VARIABLE), Echo(sys.argv[1]).routes)
