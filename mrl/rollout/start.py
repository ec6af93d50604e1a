"""From the configuration to running engines, and what to know about them."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mrl.config.schema import RolloutConfig
from mrl.config.secret_file import read_secret
from mrl.families import engine_arch
from mrl.ports import free_port
from mrl.rollout.answers import ModelInfo
from mrl.rollout.client import CONNECT_TIMEOUT_S, DENIED, Access, EngineClient, EngineError
from mrl.rollout.engine import Engine
from mrl.rollout.process import EngineProcess, EngineStartError, Launch
from mrl.rollout.sglang.command import sglang_launch
from mrl.rollout.transformers_engine.command import transformers_launch

log = logging.getLogger(__name__)


def start_engine(
    cfg: RolloutConfig, model_path: str, dtype: str, log_dir: Path, seed: int = 0, *, gpu: bool = False
) -> Engine:
    """Start `cfg.servers` servers (or take `cfg.urls`) and return at once; `Engine.wait_ready` waits and checks.

    Servers started here want a key that is drawn now and known to this run alone.

    model_path: Hugging Face directory (without safetensors the engine starts with random weights: push before use)
    dtype: "float32" or "bfloat16"
    log_dir: gets engine_N.log of every server started
    gpu: serve on GPUs with the stock engine; otherwise on the CPU
    seed: of engines that draw without per-sample seeds (rollout.deterministic: false)
    """
    processes: list[EngineProcess] = []
    if cfg.urls:
        access = Access(read_secret(cfg.api_key_file) if cfg.api_key_file is not None else None)
    else:
        key = secrets.token_hex(32)
        access = Access(key, ours=True)
        for index in range(cfg.servers):
            port = free_port()

            def launch(folder: Path, index: int = index, port: int = port) -> Launch:
                if cfg.engine == "transformers":
                    return transformers_launch(cfg, model_path, dtype, port, gpu=gpu, api_key=key)
                return sglang_launch(cfg, model_path, dtype, port, index, seed, gpu=gpu, folder=folder, api_key=key)

            file = log_dir / f"engine_{index}.log"
            processes.append(EngineProcess(f"engine {index}", launch, port, file, access))

    return Engine(
        cfg.urls or [process.url for process in processes],
        processes,
        access=access,
        vocab_size=engine_arch(model_path).vocab_size,
        concurrent_requests=cfg.concurrent_requests,
        request_timeout_s=cfg.request_timeout_s,
        check=lambda engine, url: _check(engine, url, cfg, model_path),
        startup_timeout_s=cfg.startup_timeout_s,
        max_restarts=cfg.max_restarts,
    )


def _check(engine: Engine, url: str, cfg: RolloutConfig, model_path: str) -> None:
    """The engine serves this model, and `engine.notes` gets what it cannot do. Draws one token to warm it up."""
    if engine.access.ours:
        _check_refusal(url)
    client = engine.client(url)
    end = time.monotonic() + cfg.startup_timeout_s
    try:
        info = _get_to_know(client, end, cfg, model_path)
    except EngineError as error:
        if error.status in DENIED:
            text = (
                f"engine {url} wants a key, or another one (HTTP {error.status}): rollout.api_key_file names its file"
            )
            raise EngineStartError(text) from error
        if error.status is not None or time.monotonic() < end:
            raise
        limit = f"rollout.startup_timeout_s = {cfg.startup_timeout_s:g} s"
        raise EngineStartError(f"engine {url} did not answer within {limit}: {error.endpoint}: {error.text}") from error
    finally:
        client.close()
    note = (
        f"engine {url} runs without --enable-deterministic-inference: it ignores sampling seeds, so the same "
        "(run seed, step, sample) need not give the same tokens, and a resumed run will sample differently "
        "(rollout.deterministic: false says that this is meant)"
    )
    if cfg.deterministic and not info.get("enable_deterministic_inference") and note not in engine.notes:
        engine.notes.append(note)
        log.warning("%s", note)
    if info.get("skip_tokenizer_init"):
        engine.accepts_stop_strings = False


def _get_to_know(client: EngineClient, end: float, cfg: RolloutConfig, model_path: str) -> dict[str, Any]:
    """The engine's settings. Nothing is waited for beyond `end`."""

    def in_time() -> EngineClient:
        client.timeout_s = max(0.1, end - time.monotonic())
        return client

    if cfg.urls:  # a run that was killed may have left an update of the weights half-way and requests running
        for tidy in (client.end_weight_update, client.abort_all):
            in_time()
            with contextlib.suppress(EngineError):  # nothing is open
                tidy()
    _check_model(client.url, in_time().model_info(), model_path)
    in_time().generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "temperature": 1.0}})
    return in_time().server_info()


def _check_refusal(url: str) -> None:
    """An engine of ours must be shut for strangers, whatever `rollout.server_args` has made of it. The second host name
    is one that some web servers take for the path, and /health is open to everybody."""
    stranger = EngineClient(url, CONNECT_TIMEOUT_S, Access(ours=True))
    try:
        for host in (urlsplit(url).netloc, "x/health?"):
            if stranger.is_let_in(host):
                raise EngineStartError(
                    f"engine {url} answers without the run's key (/model_info, host {host!r}): anybody on this machine "
                    "could change its weights. Is one of rollout.server_args the cause?"
                )
    finally:
        stranger.close()


def _check_model(url: str, info: ModelInfo, model_path: str) -> None:
    wanted = engine_arch(model_path).family
    if info.model_type != wanted:
        text = f"serves {info.model_path}, a {info.model_type} model; the trainer has {model_path}, a {wanted} model"
        raise EngineError(url, "model_info", 200, text)
