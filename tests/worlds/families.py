"""Run under torchrun: log-probs and every gradient of models under several layouts, against transformers in float64.

Usage: families.py RESULT_JSON MODEL_DIR=LAYOUT,LAYOUT ... Each model directory has weights and what `reference` has
written. RESULT_JSON gets {name of the directory: {layout: [worst difference of a log-prob, worst relative gradient
error, its tensor]}}. Layouts as of gradients.py; with `one` comes what `in_bfloat16` says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mrl import platform

platform.install()

from mrl.algo import aggregate  # noqa: E402
from mrl.config.schema import TrainConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.learner import Learner, losses  # noqa: E402
from mrl.parallel import Mesh, Meshes, rank  # noqa: E402
from tests.worlds.gradients import gradients, make_rollout, parse  # noqa: E402

TEMPERATURE = 0.7  # of gradients.gradients
TIMEOUT_S = 300


def of(model_dir: Path) -> Rollout:
    return make_rollout(load_arch(model_dir).vocab_size)


def reference(model_dir: Path) -> None:
    """Writes the log-probs, and the gradients under the hub's names: as weights of the model that has them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, experts_implementation="eager").eval()
    rollout, log_probs = of(model_dir), []
    lengths = zip(rollout.tokens.split(rollout.seq_lens.tolist()), rollout.prompt_lens.tolist(), strict=True)
    for tokens, prompt in lengths:
        logits = model(tokens[None]).logits[0, prompt - 1 : -1] / TEMPERATURE
        log_probs.append(logits.log_softmax(-1).gather(1, tokens[prompt:, None])[:, 0])
    (-torch.cat(log_probs).mean()).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for buffer in model.buffers():
        buffer.zero_()
    model.save_pretrained(model_dir / "exact")
    save_file({"log_probs": torch.cat(log_probs).detach()}, model_dir / "log_probs.safetensors")


def compared(model_dir: Path, mesh: Mesh) -> tuple[float, float, str]:
    train = TrainConfig(parallel=mesh.cfg, max_tokens_per_microbatch=40)
    learner = Learner("policy", load_arch(model_dir), str(model_dir), train, mesh, dtype=torch.float32, seed=0)
    rollout, exact = of(model_dir), load_file(model_dir / "log_probs.safetensors")["log_probs"]
    log_probs, _ = learner.log_probs(rollout, TEMPERATURE)
    weights = rollout.flat(aggregate.token_weights("token-mean", rollout.response_mask))
    _, got = gradients(learner, rollout, losses.cross_entropy(weights), entropy_grad=False)
    want = load_file(model_dir / "exact" / "model.safetensors")
    errors = {
        name: float((gradient.double() - want[name]).norm() / (want[name].norm() + 1e-12))
        for name, gradient in got.items()
        if want[name].any()  # not of what is frozen
    }
    worst = max(errors, key=errors.__getitem__)
    return float((log_probs.double() - exact).abs().max()), errors[worst], worst


def in_bfloat16(model_dir: Path, mesh: Mesh) -> dict[str, str]:
    """What a bfloat16 model exports in another dtype: which, and whether it is what was loaded."""
    learner = Learner("policy", load_arch(model_dir), str(model_dir), TrainConfig(), mesh, dtype=torch.bfloat16, seed=0)
    want = load_file(model_dir / "model.safetensors")
    with learner.mesh.active():
        sent = dict(learner.exporter.stream())
        return {
            name: f"{tensor.dtype} {'kept' if tensor.equal(want[name]) else 'changed'}"
            for name, tensor in sent.items()
            if tensor.dtype != torch.bfloat16
        }


def main() -> None:
    result_file, *jobs = sys.argv[1:]
    platform.init_process_group(TIMEOUT_S)
    meshes = Meshes(TIMEOUT_S)
    results: dict[str, dict[str, object]] = {}
    for job in jobs:
        model_dir, _, layouts = job.partition("=")
        found: dict[str, object] = {x: compared(Path(model_dir), meshes.get(parse(x))) for x in layouts.split(",")}
        if layouts == "one":
            found["bfloat16"] = in_bfloat16(Path(model_dir), meshes.get(parse("one")))
        results[Path(model_dir).name] = found
    if rank() == 0:
        Path(result_file).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
