"""How the transformers engine is started: as a process of its own, like SGLang, so that both die and sync alike."""

from __future__ import annotations

import os
import sys

from mrl.config.schema import RolloutConfig
from mrl.families import engine_arch
from mrl.rollout.process import Launch
from mrl.rollout.sglang.command import EngineUnavailable, without_launcher
from mrl.rollout.transformers_engine import KEY_VARIABLE


def transformers_launch(
    cfg: RolloutConfig, model_path: str, dtype: str, port: int, *, gpu: bool, api_key: str
) -> Launch:
    if cfg.tensor > 1:
        raise EngineUnavailable(
            f"rollout.tensor = {cfg.tensor}: the transformers engine runs on one device; set it to 1"
        )
    context = cfg.max_context_tokens or engine_arch(model_path).max_positions
    command = [sys.executable, "-m", "mrl.rollout.transformers_engine.server", "--model-path", model_path]
    command += ["--dtype", dtype, "--port", str(port), "--device", "cuda" if gpu else "cpu"]
    command += ["--max-running-requests", str(cfg.max_running_requests or 256)]
    command += ["--context-length", str(context)]
    env = without_launcher(dict(os.environ))
    env[KEY_VARIABLE] = api_key
    env["OMP_NUM_THREADS"] = "1" if not gpu else env.get("OMP_NUM_THREADS", "4")
    return Launch([*command, *cfg.server_args], env)
