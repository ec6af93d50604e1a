"""The HTTP front of the transformers engine: `mrl.inference.protocol` answered.

    MRL_ENGINE_KEY=... python -m mrl.inference.transformers_engine.server --model-path DIR --port N --context-length N

Every request must carry the key, as `Authorization: Bearer KEY`; what comes without it is not read.
Not here: update groups (use the shared_memory, http or disk transport), prefix caching.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from mrl.inference import protocol
from mrl.inference.delta import LOADER
from mrl.inference.protocol import Generated, MetaInfo
from mrl.inference.serving import KEY_VARIABLE, BadRequest, Route, serve
from mrl.inference.sglang.cpu_shim.mrl_cpu_engine import batch_invariance
from mrl.inference.transformers_engine.sampling import parse_job
from mrl.inference.transformers_engine.worker import Worker
from mrl.ports import HERE

log = logging.getLogger("transformers_engine")


class Endpoints:
    """HTTP endpoints: one method each, JSON in, JSON out."""

    def __init__(self, worker: Worker, context: int) -> None:
        self._worker = worker
        self._context = context
        self.routes: dict[str, Route] = {
            "/health": lambda body: {},
            protocol.MODEL_INFO.path: self.model_info,
            protocol.SERVER_INFO.path: self.server_info,
            protocol.FLUSH_CACHE.path: lambda body: {"success": True},
            protocol.ABORT.path: self.abort,
            protocol.GENERATE.path: self.generate,
            protocol.BEGIN_UPDATE.path: lambda body: _attempt(worker.begin_update),
            protocol.END_UPDATE.path: lambda body: _attempt(worker.end_update),
            protocol.UPDATE_FROM_TENSOR.path: lambda body: _attempt(
                worker.update_from_tensor,
                *(body["serialized_named_tensors"][0], body.get("load_format"), body.get("weight_version")),
            ),
            protocol.UPDATE_FROM_DISK.path: lambda body: _attempt(
                worker.update_from_disk, body["model_path"], body.get("weight_version")
            ),
            protocol.UPDATE_VERSION.path: self.update_weight_version,
            protocol.CHECKSUMS.path: self.weights_checker,
            protocol.RELEASE_MEMORY.path: lambda body: _attempt(worker.release_memory, body["tags"]),
            protocol.RESUME_MEMORY.path: lambda body: _attempt(worker.resume_memory, body["tags"]),
        }

    def model_info(self, body: dict[str, Any]) -> Any:
        model_type = self._worker.model.config.model_type
        version = self._worker.weight_version
        return {"model_path": self._worker.model_path, "model_type": model_type, "weight_version": version}

    def server_info(self, body: dict[str, Any]) -> Any:
        info: dict[str, Any] = dict.fromkeys(("enable_deterministic_inference", "enable_memory_saver"), True)
        info |= {"device": self._worker.device, "weights_checksum": "sha256"}  # on any device
        info |= {"custom_weight_loader": [LOADER]}
        info |= {"dtype": str(self._worker.model.dtype).removeprefix("torch.")}
        return info | {"skip_tokenizer_init": False, "enable_return_routed_experts": self._worker.routed is not None}

    def generate(self, body: dict[str, Any]) -> Any:
        if "logprob_start_len" in body:
            return self.score(body)
        ids, urls = body["input_ids"], body.get("image_data") or []
        routed = self._worker.routed
        asks, start = bool(body.get("return_routed_experts")), body.get("routed_experts_start_len") or 0
        if asks and routed is None:
            raise BadRequest("return_routed_experts: the model has no experts")
        if body.get("lora_path") is not None:
            raise BadRequest(f"lora_path: this engine has no adapters, and was asked for {body['lora_path']!r}")
        if type(start) is not int or not 0 <= start <= len(ids):
            raise BadRequest(f"routed_experts_start_len: {start!r} is not a number of tokens that the prompt has")
        if (sight := self._worker.sight) is None and urls:
            raise BadRequest("the model sees no pictures")
        try:
            ids, inputs = sight.read(ids, urls) if sight is not None else (ids, None)
            params = body.get("sampling_params") or {}
            job = parse_job(ids, params, self._worker.eos_ids, self._context, inputs, asks)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        version, tokens = self._worker.weight_version, self._worker.generate(job)
        meta: MetaInfo = {
            "finish_reason": job.finish,
            "prompt_tokens": len(job.prompt),
            "completion_tokens": len(tokens),
            "weight_version": version,
            "output_token_logprobs": [[value, token, None] for value, token in zip(job.log_probs, tokens)],
        }
        if job.experts is not None and routed is not None:
            meta["routed_experts"] = routed.written(job.experts[start:].numpy())
        if "rid" in body:
            meta["id"] = body["rid"]
        return Generated(output_ids=tokens, meta_info=meta)

    def score(self, body: dict[str, Any]) -> Any:
        """Answers a request for the log-probs of a prompt's own tokens, which generates nothing."""
        ids, start, top_k = body["input_ids"], body["logprob_start_len"], body.get("top_logprobs_num") or 0
        if (body.get("sampling_params") or {}).get("max_new_tokens") != 0 or body.get("image_data"):
            raise BadRequest("logprob_start_len: only with max_new_tokens 0 and without pictures")
        if type(start) is not int or not 0 <= start < len(ids):
            raise BadRequest(f"logprob_start_len: {start!r} is not the index of one of the {len(ids)} tokens")
        if type(top_k) is not int or top_k < 0:
            raise BadRequest(f"top_logprobs_num: {top_k!r} is not a number of tokens")
        if len(ids) > self._context:
            raise BadRequest(f"{len(ids)} tokens exceed the context of {self._context}")
        version = self._worker.weight_version
        values, top = self._worker.score(ids, start, top_k)
        meta: MetaInfo = {
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(ids),
            "completion_tokens": 0,
            "weight_version": version,
            "output_token_logprobs": [],
            "input_token_logprobs": [[value, token, None] for value, token in zip([None, *values], ids[start:])],
        }
        if top_k:
            rows = [[[value, token, None] for value, token in zip(*row)] for row in top]
            meta["input_top_logprobs"] = [None, *rows]
        return {"output_ids": [], "meta_info": meta}

    def abort(self, body: dict[str, Any]) -> Any:
        if not body.get("abort_all"):
            raise BadRequest("only all requests can be aborted: set abort_all")
        self._worker.abort()
        return {"success": True}

    def update_weight_version(self, body: dict[str, Any]) -> Any:
        self._worker.weight_version = str(body["new_version"])
        return {"success": True, "message": "Success"}

    def weights_checker(self, body: dict[str, Any]) -> Any:
        if body.get("action") != "checksum":
            raise BadRequest(f"unknown action {body.get('action')}")
        place = {"role": "target", "tp_rank": 0, "tp_size": 1}
        rank = {"checksums": self._worker.checksums(), "parallelism_info": [place]}
        return {"success": True, "message": "Success", "ranks": [rank]}


def _attempt(run: Callable[..., None], *args: Any) -> dict[str, Any]:
    try:
        run(*args)
    except Exception as error:  # refused: the caller reads why
        raise BadRequest(f"{type(error).__name__}: {error}") from error
    return {"success": True, "message": "Success"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default=HERE)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-running-requests", type=int, default=256)
    parser.add_argument("--context-length", type=int, required=True, help="tokens of prompt and response together")
    args = parser.parse_args()
    key = os.environ.pop(KEY_VARIABLE, "")
    if not key:
        parser.error(f"set {KEY_VARIABLE}: without a key anybody on this machine could change the weights")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if args.device == "cpu":
        torch.set_num_threads(torch.get_num_threads())  # a fork makes torch's thread pool anew: not in several threads
        batch_invariance.install()
    worker = Worker(args.model_path, getattr(torch, args.dtype), args.device, args.max_running_requests)
    log.info("%s is loaded", args.model_path)
    serve(args.port, key, Endpoints(worker, args.context_length).routes, args.host)


if __name__ == "__main__":
    main()
