"""Command of the transformers engine, a separate process like SGLang, so that failures and weight syncs work alike."""

from __future__ import annotations

import sys

from mrl.inference.errors import EngineUnavailable
from mrl.inference.launch import Launch, ServerSpec
from mrl.inference.serving import KEY_VARIABLE

ON_A_CPU = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def transformers_launch(spec: ServerSpec) -> Launch:
    """The key is in its environment, which its own account alone can read."""
    cfg = spec.cfg
    if cfg.tensor > 1:
        raise EngineUnavailable(
            f"rollout.tensor = {cfg.tensor}: the transformers engine runs on one device; set it to 1"
        )
    command = [sys.executable, "-m", "mrl.imports", "mrl.inference.transformers_engine.server"]
    command += ["--model-path", spec.model_path, "--host", spec.host, "--port", str(spec.port)]
    command += ["--dtype", spec.dtype, "--device", "cuda" if spec.gpu else "cpu"]
    command += ["--max-running-requests", str(cfg.max_running_requests or 256)]
    command += ["--context-length", str(cfg.max_context_tokens or spec.arch.max_positions)]
    env = spec.environment()
    env = {"OMP_NUM_THREADS": "4"} | env if spec.gpu else env | ON_A_CPU | {"OMP_NUM_THREADS": str(spec.threads)}
    if spec.api_key is not None:
        env[KEY_VARIABLE] = spec.api_key
    return Launch([*command, *cfg.server_args], env)
