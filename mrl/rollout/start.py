"""From the configuration to running engines, and what to know about them."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from mrl.config.schema import RolloutConfig
from mrl.ports import free_port
from mrl.rollout.client import EngineClient, EngineError, ModelInfo
from mrl.rollout.engine import Engine
from mrl.rollout.process import EngineProcess
from mrl.rollout.sglang.command import Launch, read_config, sglang_launch
from mrl.rollout.transformers_engine.command import transformers_launch

log = logging.getLogger(__name__)


def start_engine(
    cfg: RolloutConfig, model_path: str, dtype: str, log_dir: Path, seed: int = 0, *, gpu: bool = False
) -> Engine:
    """Start `cfg.servers` servers (or take `cfg.urls`) and return at once; `Engine.wait_ready` waits and checks.

    model_path: Hugging Face directory (without safetensors the engine starts with random weights: push before use)
    dtype: "float32" or "bfloat16"
    log_dir: gets engine_N.log of every server started
    gpu: serve on GPUs with the stock engine; otherwise on the CPU
    seed: of engines that draw without per-sample seeds (rollout.deterministic: false)
    """
    processes: list[EngineProcess] = []
    if not cfg.urls:
        for index in range(cfg.servers):
            port = free_port()
            launch = _launch(cfg, model_path, dtype, port, index, seed, gpu)
            file = log_dir / f"engine_{index}.log"
            processes.append(EngineProcess(f"engine {index}", launch.command, launch.env, port, file))

    return Engine(
        cfg.urls or [process.url for process in processes],
        processes,
        concurrent_requests=cfg.concurrent_requests,
        request_timeout_s=cfg.request_timeout_s,
        check=lambda engine, url: _check(engine, url, cfg, model_path),
        startup_timeout_s=cfg.startup_timeout_s,
        max_restarts=cfg.max_restarts,
    )


def _launch(cfg: RolloutConfig, model_path: str, dtype: str, port: int, index: int, seed: int, gpu: bool) -> Launch:
    if cfg.engine == "transformers":
        return transformers_launch(cfg, model_path, dtype, port, gpu=gpu)
    return sglang_launch(cfg, model_path, dtype, port, index, seed, gpu=gpu)


def _check(engine: Engine, url: str, cfg: RolloutConfig, model_path: str) -> None:
    """The engine serves this model, and `engine.notes` gets what it cannot do. Draws one token to warm it up."""
    client = EngineClient(url, timeout_s=cfg.startup_timeout_s)
    try:
        if cfg.urls:
            _take_over(client)
        _check_model(url, client.model_info(), model_path)
        client.generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "temperature": 1.0}})
        info = client.server_info()
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


def _take_over(client: EngineClient) -> None:
    """A run that was killed may have left requests running and an update of the weights half-way."""
    with contextlib.suppress(EngineError):  # nothing is open
        client.end_weight_update()
    with contextlib.suppress(EngineError):
        client.abort_all()


def _check_model(url: str, info: ModelInfo, model_path: str) -> None:
    wanted = str(read_config(model_path).get("model_type"))
    if info.model_type != wanted:
        text = f"serves {info.model_path}, a {info.model_type} model; the trainer has {model_path}, a {wanted} model"
        raise EngineError(url, "model_info", 200, text)
