"""`mrl plan` for diffusion models: its counts against measured tensors and models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="pip install 'mrl[diffusion]'")

from mrl.cli import main  # noqa: E402
from mrl.config.loader import load  # noqa: E402
from mrl.config.sections.diffusion import DiffusionModelConfig, DiffusionTrainConfig  # noqa: E402
from mrl.diffusion import nets  # noqa: E402
from mrl.diffusion.meter import cost_of  # noqa: E402
from mrl.diffusion.plan import DiffusionPlan  # noqa: E402
from mrl.plan.chips import CHIPS, GIB, NO_GPU, Assumptions, Cluster  # noqa: E402
from mrl.plan.plan import machine_of  # noqa: E402
from tests.helpers.diffusion_pipelines import KINDS, tiny_pipeline  # noqa: E402
from tests.helpers.diffusion_tools import prompts_file  # noqa: E402

ROOT = Path(__file__).parents[3]
H100 = CHIPS["h100-80g"]


def product() -> None:
    """Allocates two matrices of 256 KiB and their product; the first matrix is freed before the second product."""
    a, b = (torch.empty(256, 256, device="meta") for _ in range(2))
    c = a @ b
    del a
    (c @ b).relu_()


def exponential() -> None:
    """Allocates three tensors of 1 MiB; the backward pass needs the output."""
    x = torch.empty(512, 512, device="meta", requires_grad=True)
    x.exp().sum().backward()


@pytest.mark.parametrize(
    ("compute", "flops", "peak"),
    [(product, 4 * 256**3, 3 * 256**2 * 4), (exponential, 0, 3 * 512**2 * 4)],
)
def test_a_computation_is_counted(compute: Callable[[], None], flops: float, peak: int) -> None:
    found = cost_of(compute)
    assert found.flops == flops and abs(found.peak - peak) < 4096


def test_attention_keeps_no_scores() -> None:
    """Attention stores no scores, as on GPUs: memory grows with the tokens, operations with their square."""

    def attend(tokens: int) -> Callable[[], object]:
        q = torch.empty(1, 2, tokens, 32, device="meta")
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)

    one, two = cost_of(attend(512)), cost_of(attend(1024))
    assert two.flops == 4 * one.flops and two.peak == pytest.approx(2 * one.peak, rel=0.01)


def plan_of(recipe: str, *overrides: str) -> DiffusionPlan:
    cfg = load(ROOT / "yaml_configs" / f"{recipe}.yaml", overrides, planned=machine_of)
    return DiffusionPlan(cfg, Cluster(H100, cfg.run.nproc, 8))


@pytest.mark.slow
def test_stable_diffusion_by_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stable Diffusion's plan has the known values: 859.5 million weights, 797,184 in adapters of rank 4, and 0.8 TFLOP
    per call. Recomputing blocks costs operations and saves memory."""
    monkeypatch.chdir(ROOT)
    plan = plan_of("ddpo_sd15_1gpu", "actor.micro_batch=1")
    assert plan.trained == 797_184 and plan.frozen == 859_520_964
    assert plan.drawing.flops / plan.sampler.batch / 2 == pytest.approx(0.804e12, rel=0.01)
    again = plan_of("ddpo_sd15_1gpu", "actor.micro_batch=1", "actor.recompute=true")
    assert again.learning.peak < 0.7 * plan.learning.peak and again.learning.flops > 1.2 * plan.learning.flops


@pytest.mark.parametrize(
    "kind", [kind if kind == "dit" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_plan_counts_what_is_built(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan counts what is built, for every kind of net, from the configurations alone: weights are deleted."""
    tiny_pipeline(kind, tmp_path / "model")
    lora: dict[str, Any] = {"lora": {"rank": 2}}
    model = DiffusionModelConfig(path=str(tmp_path / "model"))
    built = nets.build(model, DiffusionTrainConfig.model_validate(lora))
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    config = tmp_path / "config.yaml"
    sampler = "{kind: flow_sde}" if kind in ("sd3", "flux") else "{}"
    config.write_text(
        f"trainer: ddpo\nrun: {{name: planned, steps: 1}}\nmodel: {{path: {model.path}, image_size: 16}}\n"
        f"actor: {{lora: {{rank: 2}}}}\ndata: {{train: {prompts_file(tmp_path / 'prompts.jsonl')}}}\n"
        f"sampler: {sampler}\nbatch: {{prompts_per_step: 16}}\nreward: {{function: brightness}}\n"
    )
    cfg = load(config, planned=machine_of)
    plan = DiffusionPlan(cfg, Cluster(H100, 2), Assumptions())
    trained = sum(each.numel() for each in built.parameters() if each.requires_grad)
    assert (plan.trained, plan.frozen) == (trained, sum(each.numel() for each in built.parameters()) - trained)
    assert plan.images == 8 and plan.rows == 8 * 50 and plan.images_per_s > 0 and not plan.problems
    small = DiffusionPlan(cfg, Cluster(replace(H100, memory=GIB), 2))
    *_, last = small.lines()
    assert last.startswith(
        "The run does not fit:\n  rollout: 2.5 GiB on GPUs of 1.0 GiB\n    -> a smaller sampler.batch"
    )
    assert main(["plan", str(config), "--search"]) == 2
    assert "--search and --svg plan language models only" in capsys.readouterr().err
    assert main(["plan", str(config), "--gpus", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["net"]["trained"] == trained and shown["images_per_s"] == pytest.approx(plan.images_per_s)
    of_cpus = DiffusionPlan(cfg, Cluster(NO_GPU, 2))
    assert not of_cpus.parts() and list(of_cpus.lines())[-1].startswith("On CPUs: a node needs")
