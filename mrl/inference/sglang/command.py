"""The command line and environment of one SGLang server (written against sglang 0.5.23)."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

from mrl.config.fp8_shapes import ENGINE_BLOCK
from mrl.families import FAMILIES, hf_keys
from mrl.families.engine_cache import cpu_requests
from mrl.inference.errors import EngineUnavailable
from mrl.inference.launch import Launch, ServerSpec
from mrl.packages import missing_of_extra, pip_install
from mrl.ports import GLOO, interface_of

SHIM = Path(__file__).with_name("cpu_shim")
PICTURES_MIB = 256  # what is computed of pictures before the tower; the weights have no part in it
# of torch's own allocator, and for the trainer: its expandable segments exclude torch_memory_saver
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# as quantised checkpoints of the hub say it; mrl.weights.sync.quantized sends weights of this form
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [ENGINE_BLOCK, ENGINE_BLOCK]}
CONTEXT_KEPT = 6
MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def sglang_launch(spec: ServerSpec) -> Launch:
    """Returns the command of a stock server on its own GPUs if `spec.gpu`, else of SGLang's CPU form.

    Its folder gets the file that tells the server its key, and the one over which its processes meet, for want of a
    port that nobody else could take.
    Raises EngineUnavailable where SGLang is not installed, or not in the form that this machine needs.
    """
    if importlib.util.find_spec("sglang") is None:
        raise EngineUnavailable(
            "rollout.engine = sglang, but the package sglang is not installed: mrl doctor has the command for "
            "that; or give rollout.urls of running servers, or set rollout.engine: transformers"
        )
    if (problem := unavailable(spec.gpu)) is not None:
        raise EngineUnavailable(problem)
    arguments = _common(spec) + (_gpu(spec) if spec.gpu else _cpu(spec))
    # without crash dumps, for which a server that lost a process would stay up for a minute
    env = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"} | spec.environment()
    env = _gpu_env(spec, env) if spec.gpu else env | cpu_environment(spec.cfg.tensor, spec.threads)
    if spec.arch.vision is not None:  # else a picture's features outlive the weights that made them, and /flush_cache
        env["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    if spec.part is None:
        env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{spec.folder}/rendezvous"
    else:
        arguments += ["--nnodes", str(spec.part.nodes), "--node-rank", str(spec.part.number)]
        arguments += ["--dist-init-addr", spec.part.meeting]
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # see _context; the run asks for no place beyond the model's
    env[GLOO] = interface_of(spec.host)  # where ranks of the trainer meet it, too
    env["SGLANG_DIAG_BYPASS_HEALTH_GENERATE"] = "1"  # /health asks for no key, and would sample a token among the run's
    if spec.api_key is not None:
        file = spec.folder / "key.yaml"  # that only this account can read, unlike a command line
        file.touch(0o600)
        file.write_text(f'api-key: "{spec.api_key}"\n')
        arguments += ["--config", str(file)]
    return Launch([sys.executable, "-m", "sglang.launch_server", *arguments, *spec.cfg.server_args], env)


def unavailable(gpu: bool) -> str | None:
    """Why an SGLang that is installed cannot serve here; None if it can."""
    if gpu:
        return None
    present = [name for name in ("triton", "sgl_kernel") if importlib.util.find_spec(name) is not None]
    if present:
        return (
            f"no GPU is visible, and {' and '.join(present)} is installed: mrl's CPU form of the SGLang server works "
            "only in an environment without them. Set up the CPU environment of the README, give rollout.urls of "
            "running servers, or set rollout.engine: transformers"
        )
    lacks = missing_of_extra("cpu")
    if lacks:
        return f"on a CPU it needs {', '.join(lacks)} too: {pip_install(*lacks)}"
    return None


def _common(spec: ServerSpec) -> list[str]:
    cfg, seed = spec.cfg, (spec.seed + spec.index) % 2**32  # what numpy takes
    arguments = ["--model-path", spec.model_path, "--host", spec.host, "--port", str(spec.port)]
    arguments += ["--dtype", spec.dtype, "--tp-size", str(cfg.tensor), "--random-seed", str(seed)]
    arguments += ["--skip-server-warmup", "--log-level", "warning"]
    if not cfg.sampling.stop:  # token ids travel; only stop strings need the engine to know text
        arguments.append("--skip-tokenizer-init")
    if cfg.deterministic:
        arguments.append("--enable-deterministic-inference")
    arguments += ["--context-length", str(_context(spec))]
    is_empty = not any(Path(spec.model_path).glob("*.safetensors"))
    if is_empty or cfg.quantization == "fp8":  # from scratch, or files of another form: the first weight sync fills it
        arguments += ["--load-format", "dummy"]
    if spec.arch.vision is not None:
        # a prompt's samples are requests of their own
        arguments += ["--mm-preprocess-cache-size-mb", str(PICTURES_MIB)]
        if cfg.tensor > 1:  # the tower whole on each rank, as it is synced, and a picture on one of them
            arguments.append("--mm-enable-dp-encoder")
    family = FAMILIES.get(spec.arch.family)
    config = dict(family.engine_config(hf_keys(spec.model_path))) if family else {}
    config |= {"quantization_config": FP8} if cfg.quantization == "fp8" else {}
    if config:
        arguments += ["--json-model-override-args", json.dumps(config)]
    return arguments


def _context(spec: ServerSpec) -> int:
    """Returns the context length to ask for: SGLang accepts prompts of up to 7 tokens less, and cuts responses 2 tokens
    earlier."""
    return (spec.cfg.max_context_tokens or spec.arch.max_positions) + CONTEXT_KEPT


def _gpu(spec: ServerSpec) -> list[str]:
    cfg = spec.cfg
    arguments = ["--mem-fraction-static", str(cfg.memory_fraction)]
    if cfg.release != "none":
        arguments.append("--enable-memory-saver")  # without a copy of the weights: a weight sync brings them back
    if cfg.max_running_requests is not None:
        arguments += ["--max-running-requests", str(cfg.max_running_requests)]
    if spec.arch.shared_width is not None:  # else it lies among the routed experts, where no sync would look for it
        arguments.append("--disable-shared-experts-fusion")
    family = FAMILIES.get(spec.arch.family)
    if family is not None and family.biases:  # others keep the experts' matrices in forms that differ with the machine
        arguments += ["--moe-runner-backend", "triton"]
    return arguments


def _gpu_env(spec: ServerSpec, env: dict[str, str]) -> dict[str, str]:
    if spec.shares_gpus:  # ranks of the trainer need not use theirs alike
        env.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")
    if spec.cfg.release == "none":
        return env
    if importlib.util.find_spec("torch_memory_saver") is None:
        raise EngineUnavailable(
            f"rollout.release = {spec.cfg.release} needs the package torch_memory_saver, which SGLang gives GPU memory "
            "up with: install it, or set rollout.release: none"
        )
    return {name: value for name, value in env.items() if name not in ALLOCATOR}


def _cpu(spec: ServerSpec) -> list[str]:
    cfg, context = spec.cfg, _context(spec)
    wanted = cfg.max_running_requests or -(-cfg.concurrent_requests // cfg.servers)
    running = cpu_requests(spec.arch, DTYPE_BYTES[spec.dtype], context, wanted)
    arguments = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    if cfg.deterministic and (spec.arch.latent is not None or spec.arch.vision is not None):
        # SGLang refuses prefix caching with latent attention then; with pictures it has not been tested
        arguments.append("--disable-radix-cache")
    arguments += ["--lora-backend", "torch_native"]  # of adapters, if it is to take any
    arguments += ["--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle"]  # idle, it would take a core
    arguments += ["--max-running-requests", str(running)]
    arguments += ["--max-total-tokens", str(running * context)]  # a full context for each request
    if spec.arch.vision is not None:
        arguments += ["--image-processor-backend", "pil"]  # of torchvision there is a stub
    return arguments


def cpu_environment(tensor: int, threads: int) -> dict[str, str]:
    """Returns the variables that SGLang's CPU form has beside those of `ServerSpec`."""
    paths = [str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_USE_CPU_ENGINE": "1",
        MODELS: os.environ.get(MODELS, "mrl_cpu_engine.model"),  # else all are imported, a sixth of the start
        "SGLANG_ENABLE_TORCH_INFERENCE_MODE": "true",  # else every call of torch minds gradients
        "SGLANG_EAGER_INPUT_NO_COPY": "true",  # into the places where a CUDA graph would look for a batch
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",
    }
    if tensor > 1:
        cores = os.cpu_count() or 1
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(tensor))
    return env
