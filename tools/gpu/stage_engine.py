"""The engine on the trainer's GPU: weights by CUDA IPC, proved by checksum; log-probs in bfloat16; memory that each
gives up for the other; a model of 0.6B."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from tools.gpu.sleep import sleep
from tools.gpu.stage import Failed, Numbers, Setting, Skipped, require
from tools.gpu.stage_cuda import of_sft
from tools.gpu.trained import ONE_RANK, learnt, of_data, sampled, task, train

ROUNDED_NATS = 0.05  # a token's log-prob in the mean, both sides in bfloat16; about 0.01 is usual
RUN_S = 110.0
LAYERS = "actor.layers=local"  # what transformer-engine may do is its own stage's business
NOTHING_GIVEN_UP = ("actor.offload=none", "rollout.release=none")
SMALL, LARGE = "sort-20m", "Qwen3-0.6B"


def has_sglang() -> bool:
    return importlib.util.find_spec("sglang") is not None


def engine(sglang: bool) -> list[str]:
    """SGLang with the kernels that are there, or mrl's own."""
    if not sglang:
        return ["rollout.engine=transformers", "sync.transport=shared_memory", "rollout.memory_fraction=0.7"]
    own = [f"rollout.server_args=[{','.join(words)}]"] if (words := server_args()) else []
    return ["rollout.engine=sglang", "sync.transport=cuda_ipc", *own]


def server_args() -> tuple[str, ...]:
    plain = ("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none")
    plain += ("--disable-cuda-graph",)
    return () if importlib.util.find_spec("flashinfer") is not None else plain


def sft(setting: Setting) -> Numbers:
    made = task(setting, SMALL)
    words = [*of_sft(made), LAYERS, "run.steps=60", "actor.optimizer.warmup_steps=10"]
    numbers = learnt(train(setting, "sft bf16", "quickstart_gpu_sft", words, RUN_S))
    return require(numbers | {"of the first": numbers["last loss"] / numbers["first loss"]}, **{"of the first": 0.9})


def release() -> str:
    """What the engines can give up here."""
    return "all" if has_sglang() and importlib.util.find_spec("torch_memory_saver") is not None else "none"


def by_sglang(setting: Setting) -> Numbers:
    """Every push is proved by a checksum: the run fails otherwise."""
    if not has_sglang():
        raise Skipped("sglang is not installed")
    return grpo(setting, "sglang", sglang=True)


def sleeps(setting: Setting) -> Numbers:
    if not has_sglang() and not setting.rehearsal:
        raise Skipped("sglang is not installed")
    if setting.rehearsal:
        return sleep(setting, task(setting) / "model_init", ())
    return sleep(setting, task(setting, SMALL) / "model_init", server_args())


def apart(setting: Setting) -> Numbers:
    """The engine sees its own GPU first: numbers of GPUs are not the trainer's, UUIDs are."""
    from mrl.platform import gpu_count

    if not has_sglang():
        raise Skipped("sglang is not installed")
    if (found := gpu_count()) < 2 and not setting.rehearsal:
        raise Skipped(f"needs 2 GPUs, there is {found}")
    words = [*of_grpo(setting), *engine(True), *NOTHING_GIVEN_UP, "rollout.gpus=[1]", "run.steps=1"]
    return require(sampled(train(setting, "apart", "quickstart_gpu", words, RUN_S, gpus=2)), mismatch_mean=ROUNDED_NATS)


def by_transformers(setting: Setting) -> Numbers:
    if has_sglang() and not setting.rehearsal:
        raise Skipped("SGLang is there")
    return grpo(setting, "transformers", sglang=False)


def grpo(setting: Setting, name: str, sglang: bool) -> Numbers:
    words = [*of_grpo(setting), *engine(sglang), *NOTHING_GIVEN_UP, "run.steps=6"]
    return require(sampled(train(setting, name, "quickstart_gpu", words, RUN_S)), mismatch_mean=ROUNDED_NATS)


def given_up(setting: Setting) -> Numbers:
    """The same run with everything of the actor in host memory while it is not needed, and SGLang's memory given up;
    where SGLang cannot, with mrl's own engine, which has none there."""
    words = [
        *of_grpo(setting),
        *engine(release() == "all"),
        "actor.offload=all",
        f"rollout.release={release()}",
        "run.steps=3",
    ]
    rows = train(setting, "given up", "quickstart_gpu", words, RUN_S)
    moved = {name: rows[-1][name] for name in ("memory/offloaded_gib", "memory/offload_s")}
    peaks = {name: value for name, value in rows[-1].items() if name.startswith("memory/peak_gib")}
    if not moved["memory/offloaded_gib"]:
        raise Failed("nothing was moved", moved)
    return require(sampled(rows) | {"release": release()} | moved | peaks, mismatch_mean=ROUNDED_NATS)


def of_grpo(setting: Setting) -> list[str]:
    made, left = task(setting, SMALL), setting.work / "runs" / "sft bf16" / "hf"
    scratch = not (left / "config.json").is_file()
    own = [f"model.path={made / 'model_init' if scratch else left}", f"model.from_scratch={str(scratch).lower()}"]
    return [*ONE_RANK, *own, *of_data(made), LAYERS, "sync.verify=checksum", "batch.prompts_per_step=64"]


def large(setting: Setting) -> Numbers:
    """The shipped run of a 0.6B model with random weights: trainer, its optimizer and the engine on one GPU."""
    made = task(setting, LARGE)
    own = [f"model.path={made}/model_init", "model.from_scratch=true", "data.chat_template=false", *of_data(made)]
    small = {
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
    words = [*ONE_RANK, *own, *(f"{key}={value}" for key, value in small.items()), *engine(has_sglang()), LAYERS]
    numbers = sampled(train(setting, "qwen", "grpo_qwen0.6b_1gpu", words, 150.0))
    pushed = bytes_of(Path("yaml_configs/models") / LARGE) / 1e9
    return require(numbers | {"sync GB/s": pushed / numbers["sync s"]}, mismatch_mean=ROUNDED_NATS)


def bytes_of(model: Path) -> int:
    """Of its weights in bfloat16, as they are pushed."""
    from mrl.families import load_arch
    from mrl.families.table import weight_table

    table = weight_table(load_arch(model), "policy")
    return 2 * sum(math.prod(shape) for row in table.values() if row.copy_of is None for shape in row.shapes)


CHECKS = {
    "SFT, bfloat16": sft,
    "GRPO, bfloat16, SGLang, weights by CUDA IPC with checksum": by_sglang,
    "GRPO, bfloat16, transformers engine": by_transformers,
    "SGLang gives memory up and takes it back": sleeps,
    "GRPO of a 0.6B model": large,
    "memory given up between the parts of a step": given_up,
    "GRPO, SGLang on the second GPU, weights by CUDA IPC": apart,
}
