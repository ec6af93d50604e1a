"""The engine on the trainer's GPU: weights by CUDA IPC, verified by checksum; log-probs in bfloat16; memory that engine
and trainer release for each other; a model of 0.6B."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from tools.gpu.sleep import sleep
from tools.gpu.stage import Failed, Numbers, Setting, Skipped, require
from tools.gpu.stage_cuda import sft_overrides, start_overrides
from tools.gpu.trained import ONE_RANK, data_overrides, rollout_numbers, task, train, training_numbers

ROUNDED_NATS = 0.05  # bound of the mean difference of a token's log-prob, both sides in bfloat16; 0.01 is usual
RUN_S = 110.0
LAYERS = "actor.layers=local"  # transformer-engine's layers have a stage of their own
NOTHING_RELEASED = ("actor.offload=none", "rollout.release=none")
SMALL, LARGE = "sort-20m", "Qwen3-0.6B"


def has_sglang() -> bool:
    return importlib.util.find_spec("sglang") is not None


def engine_overrides(sglang: bool) -> list[str]:
    """Selects SGLang, with the kernels that are installed, or mrl's own engine."""
    if not sglang:
        return ["rollout.engine=transformers", "sync.transport=shared_memory", "rollout.memory_fraction=0.7"]
    server = [f"rollout.server_args=[{','.join(args)}]"] if (args := server_args()) else []
    return ["rollout.engine=sglang", "sync.transport=cuda_ipc", *server]


def server_args() -> tuple[str, ...]:
    """Returns SGLang's arguments for a machine without flashinfer; none with it."""
    if importlib.util.find_spec("flashinfer") is not None:
        return ()
    kernels = ("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none")
    return (*kernels, "--disable-cuda-graph")


def sft(setting: Setting) -> Numbers:
    overrides = [*sft_overrides(task(setting, SMALL)), LAYERS, "run.steps=60", "actor.optimizer.warmup_steps=10"]
    numbers = training_numbers(train(setting, "sft bf16", "quickstart_gpu_sft", overrides, RUN_S))
    return require(numbers | {"of the first": numbers["last loss"] / numbers["first loss"]}, **{"of the first": 0.9})


def release() -> str:
    """Returns the memory that engines on this machine can release, as the value of rollout.release."""
    return "all" if has_sglang() and importlib.util.find_spec("torch_memory_saver") is not None else "none"


def by_sglang(setting: Setting) -> Numbers:
    """Verifies every weight sync by checksum: the run fails if one differs."""
    if not has_sglang():
        raise Skipped("sglang is not installed")
    return grpo(setting, "sglang", sglang=True)


def sglang_sleeps(setting: Setting) -> Numbers:
    if not has_sglang() and not setting.rehearsal:
        raise Skipped("sglang is not installed")
    if setting.rehearsal:
        return sleep(setting, task(setting) / "model_init", ())
    return sleep(setting, task(setting, SMALL) / "model_init", server_args())


def second_gpu(setting: Setting) -> Numbers:
    """Places the engine on another GPU. Its processes number GPUs differently, so the sync must compare UUIDs."""
    from mrl.platform import gpu_count

    if not has_sglang():
        raise Skipped("sglang is not installed")
    if (gpus := gpu_count()) < 2 and not setting.rehearsal:
        raise Skipped(f"needs 2 GPUs; this machine has {gpus}")
    overrides = [*grpo_overrides(setting), *engine_overrides(True), *NOTHING_RELEASED, "rollout.gpus=[1]"]
    overrides += ["run.steps=1"]
    rows = train(setting, "second GPU", "quickstart_gpu", overrides, RUN_S, gpus=2)
    return require(rollout_numbers(rows), mismatch_mean=ROUNDED_NATS)


def by_transformers(setting: Setting) -> Numbers:
    if has_sglang() and not setting.rehearsal:
        raise Skipped("SGLang is installed")
    return grpo(setting, "transformers", sglang=False)


def grpo(setting: Setting, name: str, sglang: bool) -> Numbers:
    overrides = [*grpo_overrides(setting), *engine_overrides(sglang), *NOTHING_RELEASED, "run.steps=6"]
    rows = train(setting, name, "quickstart_gpu", overrides, RUN_S)
    return require(rollout_numbers(rows), mismatch_mean=ROUNDED_NATS)


def memory_released(setting: Setting) -> Numbers:
    """Offloads the whole actor to host memory while it is idle, and releases SGLang's memory during training.

    Where SGLang cannot release memory, mrl's own engine runs, which holds no GPU memory.
    """
    overrides = [
        *grpo_overrides(setting),
        *engine_overrides(release() == "all"),
        "actor.offload=all",
        f"rollout.release={release()}",
        "run.steps=3",
    ]
    rows = train(setting, "released", "quickstart_gpu", overrides, RUN_S)
    moved = {name: rows[-1][name] for name in ("memory/offloaded_gib", "memory/offload_s")}
    peaks = {name: value for name, value in rows[-1].items() if name.startswith("memory/peak_gib")}
    if not moved["memory/offloaded_gib"]:
        raise Failed("nothing was offloaded", moved)
    return require(rollout_numbers(rows) | {"release": release()} | moved | peaks, mismatch_mean=ROUNDED_NATS)


def grpo_overrides(setting: Setting) -> list[str]:
    start = start_overrides(task(setting, SMALL), setting.work / "runs" / "sft bf16" / "hf")
    return [*ONE_RANK, *start, LAYERS, "sync.verify=checksum", "batch.prompts_per_step=64"]


def large(setting: Setting) -> Numbers:
    """Runs grpo_qwen0.6b_1gpu.yaml with random weights: trainer, optimizer and engine on one GPU."""
    task_dir = task(setting, LARGE)
    settings = {
        "model.path": f"{task_dir}/model_init",
        "model.from_scratch": "true",
        "data.chat_template": "false",
        "run.steps": 3,
        "data.max_prompt_tokens": 64,
        "batch.prompts_per_step": 32 if has_sglang() else 4,  # mrl's own engine samples on the CPU
        "batch.samples_per_minibatch": "null",
        "rollout.sampling.max_new_tokens": 64,
        "rollout.max_context_tokens": 128,
        "reward.function": "sorted_digits",
        "validation.prompts": 16,
        "checkpoint.every_steps": "null",
        "checkpoint.export_hf": "false",
        "rollout.release": release(),
        "actor.offload": "none" if release() == "none" else "all",
    }
    overrides = [*ONE_RANK, *data_overrides(task_dir), *(f"{key}={value}" for key, value in settings.items())]
    overrides += [*engine_overrides(has_sglang()), LAYERS]
    numbers = rollout_numbers(train(setting, "qwen", "grpo_qwen0.6b_1gpu", overrides, 150.0))
    synced_gb = bfloat16_bytes(Path("yaml_configs/models") / LARGE) / 1e9
    return require(numbers | {"sync GB/s": synced_gb / numbers["sync s"]}, mismatch_mean=ROUNDED_NATS)


def bfloat16_bytes(model: Path) -> int:
    """Returns the bytes of a model's weights in bfloat16, in which they are synced."""
    from mrl.families import load_arch
    from mrl.families.table import weight_table

    table = weight_table(load_arch(model), "policy")
    return 2 * sum(math.prod(shape) for row in table.values() if row.copy_of is None for shape in row.shapes)


CHECKS = {
    "SFT, bfloat16": sft,
    "GRPO, bfloat16, SGLang, weights by CUDA IPC with checksum": by_sglang,
    "GRPO, bfloat16, transformers engine": by_transformers,
    "SGLang gives memory up and takes it back": sglang_sleeps,
    "GRPO of a 0.6B model": large,
    "memory given up between the parts of a step": memory_released,
    "GRPO, SGLang on the second GPU, weights by CUDA IPC": second_gpu,
}
