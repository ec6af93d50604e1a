"""Run under torchrun: log-probs and every gradient of models under several layouts, against transformers in float64.

Usage: families.py RESULT_JSON MODEL_DIR=LAYOUT,LAYOUT ... Each model directory has weights and the output of
`reference`. RESULT_JSON gets {name of the directory: {layout: [worst difference of a log-prob, worst relative gradient
error, its tensor]}}. Layouts are as in gradients.py; `one` adds the result of `in_bfloat16`. `critic:LAYOUT` compares
the values of a critic with the model's decoder.
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
from mrl.families.table import HF_VALUE_BIAS, HF_VALUE_HEAD, Role  # noqa: E402
from mrl.learner import Learner, Loss, losses  # noqa: E402
from mrl.learner.loss_terms import LossParts  # noqa: E402
from mrl.parallel import Mesh, Meshes, rank  # noqa: E402
from tests.worlds.gradients import gradients, make_rollout, parse, show_all  # noqa: E402

TEMPERATURE = 0.7  # the temperature of gradients.gradients
TIMEOUT_S = 300


def of(model_dir: Path) -> Rollout:
    return make_rollout(load_arch(model_dir).vocab_size)


def shares(count: int) -> torch.Tensor:
    """Returns the coefficients with which a critic's loss sums its values."""
    return torch.randn(count, generator=torch.Generator().manual_seed(1)) / count


def reference(model_dir: Path, *roles: Role) -> None:
    """Writes the log-probs or values, and the gradients under Hugging Face names, as the weights of a saved model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, experts_implementation="eager").eval()
    rollout, log_probs, values = of(model_dir), [], []
    head = torch.linspace(-1, 1, model.config.hidden_size, dtype=torch.float64)
    lengths = zip(rollout.tokens.split(rollout.seq_lens.tolist()), rollout.prompt_lens.tolist(), strict=True)
    for tokens, prompt in lengths:
        out = model(tokens[None], output_hidden_states=True)
        logits = out.logits[0, prompt - 1 : -1] / TEMPERATURE
        log_probs.append(logits.log_softmax(-1).gather(1, tokens[prompt:, None])[:, 0])
        values.append(out.hidden_states[-1][0, prompt - 1 : -1] @ head)
    outputs = {"policy": torch.cat(log_probs), "critic": torch.cat(values)}
    totals = {
        "policy": -outputs["policy"].mean(),
        "critic": outputs["critic"] @ shares(len(outputs["critic"])).double(),
    }
    weights = [*model.parameters()]
    found = {r: torch.autograd.grad(totals[r], weights, retain_graph=True, materialize_grads=True) for r in roles}
    for buffer in model.buffers():
        buffer.zero_()
    for role in roles:
        for parameter, gradient in zip(weights, found[role], strict=True):
            parameter.data = gradient
        model.save_pretrained(model_dir / role)
        save_file({"outputs": outputs[role].detach()}, model_dir / f"{role}.safetensors")


def compared(model_dir: Path, layout: str, meshes: Meshes) -> tuple[float, float, str]:
    role: Role = "critic" if layout.startswith("critic:") else "policy"
    layout, _, recompute = layout.removeprefix("critic:").partition("/")
    mesh = meshes.get(parse(layout))
    train = TrainConfig(parallel=mesh.cfg, max_tokens_per_microbatch=40, recompute=recompute or "none")  # type: ignore[arg-type]
    learner = Learner(role, load_arch(model_dir), str(model_dir), train, mesh, dtype=torch.float32, seed=0)
    rollout, exact = of(model_dir), load_file(model_dir / f"{role}.safetensors")["outputs"]
    if role == "policy":
        output, _ = learner.log_probs(rollout, TEMPERATURE)
        weights = rollout.flat(aggregate.token_weights("token-mean", rollout.response_mask))
        loss = losses.cross_entropy(weights)
    else:
        show_all(learner)
        output, weights = learner.values(rollout), shares(len(exact))
        loss = Loss(lambda output, dest: LossParts(output[0] @ weights[dest], []), ())
    _, got = gradients(learner, rollout, loss, entropy_grad=False)
    want = load_file(model_dir / role / "model.safetensors")
    errors = {
        name: float((gradient.double() - want[name]).norm() / (want[name].norm() + 1e-12))
        for name, gradient in got.items()
        if name not in (HF_VALUE_HEAD, HF_VALUE_BIAS) and want[name].any()  # frozen parameters have no gradient
    }
    worst = max(errors, key=errors.__getitem__)
    return float((output.double() - exact).abs().max()), errors[worst], worst


def in_bfloat16(model_dir: Path, mesh: Mesh) -> dict[str, str]:
    """Returns a bfloat16 model's exported tensors of another dtype: the dtype, and "kept" or "changed"."""
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
        found: dict[str, object] = {x: compared(Path(model_dir), x, meshes) for x in layouts.split(",")}
        if layouts.startswith("one"):
            found["bfloat16"] = in_bfloat16(Path(model_dir), meshes.get(parse("one")))
        results[Path(model_dir).name] = found
    if rank() == 0:
        Path(result_file).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
