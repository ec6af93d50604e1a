"""Measures the GPU memory that a sleeping engine releases and takes back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tools.gpu.stage import Failed, Numbers, Setting, require
from tools.gpu.trained import with_weights

if TYPE_CHECKING:
    from mrl.inference.engine import Engine

FRACTION = 0.3
PROMPTS = [(5, 7, 9), (8, 9), tuple(range(3, 15))]


def sleep(setting: Setting, sizes: Path, server_args: tuple[str, ...]) -> Numbers:
    """Measures free device memory while an engine is awake, without its cache, asleep, and awake again.

    Raises Failed if the engine samples other tokens after waking up, or keeps too much memory. A rehearsal uses mrl's
    own engine on the CPU, where no device memory is measured.

    Args:
        sizes: a model directory without weights; random weights are added
    """
    from mrl.config.derived import Machine
    from mrl.config.schema import RolloutConfig
    from mrl.inference.protocol import RELEASED_PARTS
    from mrl.inference.start import start_engine

    cfg = RolloutConfig(
        engine="transformers" if setting.rehearsal else "sglang",
        release="all",
        memory_fraction=FRACTION,
        max_context_tokens=64,
        server_args=server_args,
    )
    model, before = with_weights(sizes, setting.work / "random weights"), free_gb(setting)
    machine = Machine(1, 1, gpus=0 if setting.rehearsal else 1, joined=True)
    logs = Path(tempfile.mkdtemp(dir=setting.work))
    with start_engine(cfg, str(model), "bfloat16", logs, machine=machine) as engine:
        engine.wait_ready()
        first_tokens, awake = greedy(engine), free_gb(setting)
        engine.release_memory(RELEASED_PARTS["cache"])
        without_cache = free_gb(setting)
        engine.release_memory(RELEASED_PARTS["all"])
        asleep = free_gb(setting)
        engine.resume_memory(["weights"])
        for url in engine.urls:
            engine.pool.client(url).update_weights_from_disk(str(model), weight_version="again")
        engine.has_synced("again")
        engine.resume_memory(RELEASED_PARTS["all"])
        again = free_gb(setting)
        if greedy(engine) != first_tokens:
            raise Failed("the engine samples other tokens than before it slept")
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e9
    numbers = {"cache GB": without_cache - awake, "weights GB": asleep - without_cache, "engine GB": before - awake}
    if setting.rehearsal:
        return numbers
    kept = {"of the cache kept": 1 - numbers["cache GB"] / (FRACTION * before - weights)}
    kept |= {"of the weights kept": 1 - numbers["weights GB"] / weights, "not taken back GB": again - awake}
    limits = {"of the cache kept": 0.3, "of the weights kept": 0.2, "not taken back GB": 0.5}
    return require(numbers | kept, **limits)


def free_gb(setting: Setting) -> float:
    import torch

    return 0.0 if setting.rehearsal else torch.cuda.mem_get_info()[0] / 1e9


def greedy(engine: Engine) -> list[list[int]]:
    from mrl.core import Prompt, Request, SamplingParams

    requests = [Request(i, i, Prompt(i, prompt, {}), i) for i, prompt in enumerate(PROMPTS)]
    samples = engine.generate(requests, SamplingParams(temperature=0, max_new_tokens=16))
    return [sample.response_ids.tolist() for sample in samples]
