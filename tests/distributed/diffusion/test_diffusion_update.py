"""Updates of a diffusion policy: ratio 1 before the first update, its gradient, equal results on any number of
ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

diffusers = pytest.importorskip("diffusers", reason="pip install 'mrl[diffusion]'")

from mrl.config.sections.diffusion import (  # noqa: E402
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionTrainConfig,
    SamplerConfig,
)
from mrl.config.sections.models import OptimizerConfig  # noqa: E402
from mrl.core import StepStats  # noqa: E402
from mrl.diffusion.conditioning import PromptRow  # noqa: E402
from mrl.diffusion.ddpo import StepSamples, _learn, prompt_names  # noqa: E402
from mrl.diffusion.images import NO_STEP  # noqa: E402
from mrl.diffusion.learner import DiffusionLearner  # noqa: E402
from mrl.diffusion.pipeline import Pipeline  # noqa: E402
from mrl.diffusion.sample import DiffusionError, Trajectories, draw  # noqa: E402
from mrl.diffusion.update import Policy, chosen_steps, make_update  # noqa: E402
from mrl.observe import SilentRecorder  # noqa: E402
from mrl.trainers.shared.updates import Updates  # noqa: E402
from tests.helpers.diffusion_tools import tiny_directory, with_ranks  # noqa: E402
from tests.helpers.slow import slow_cases  # noqa: E402

CASES = ("plain", "unet", "lora", *slow_cases("sharded", "kl"))


def policy_of(path: Path, kind: str, guidance: float = 3.0, dtype: str = "float32", **loss: Any) -> Policy:
    pipeline = Pipeline.load(DiffusionModelConfig(path=str(path), dtype=dtype))
    sampler = SamplerConfig(kind=kind, steps=4, guidance=guidance, batch=3)
    return Policy.of(pipeline, sampler, DiffusionLossConfig(**loss), micro_batch=5)


def sampled(policy: Policy, count: int = 4, step: int = 0) -> Trajectories:
    conditioning = policy.pipeline.conditioning.encode([PromptRow("", i % 3, {}) for i in range(count)])
    return draw(
        policy.pipeline, policy.steps, policy.sampler, range(count), conditioning, (1, step), lambda ids, images: None
    )


def rows_of(policy: Policy, count: int = 4) -> torch.Tensor:
    return torch.tensor([(i, place) for i in range(count) for place in policy.steps.counted])


@pytest.mark.parametrize(
    ("net", "kind", "guidance", "dtype"),
    [
        ("dit", "ddim", 1.0, "float32"),
        ("dit", "ddim", 3.0, "bfloat16"),
        ("dit", "flow_sde", 3.0, "float32"),
        ("unet", "ddim", 3.0, "float32"),
    ],
)
def test_before_the_first_update_the_ratio_is_1(
    tmp_path: Path, net: str, kind: str, guidance: float, dtype: str
) -> None:
    """Before the first update the ratio is 1, although the net has dropout, and a batch has another number of rows than
    when the images were generated."""
    path = tiny_directory(tmp_path, net, "flow" if kind == "flow_sde" else "ddim")
    policy = policy_of(path, kind, guidance, dtype)
    data, rows = sampled(policy), rows_of(policy)
    log_probs, _ = policy.log_probs(data, rows)
    moved = (log_probs.detach() - data.log_probs[rows[:, 0], rows[:, 1]]).abs().max()
    assert moved < (3e-5 if dtype == "float32" else 1e-3)
    assert data.log_probs.abs().min() > 0 and data.latents.isfinite().all()


def test_the_first_gradient_is_that_of_reinforce(tmp_path: Path) -> None:
    policy = policy_of(tiny_directory(tmp_path), "ddim")
    data, rows, weights = sampled(policy), rows_of(policy), torch.tensor([1.0, -1.0, 0.5, 0.0])
    learner = DiffusionLearner(policy.pipeline.net, OptimizerConfig(lr=0.0, clip_grad=1e9))
    log_probs, _ = policy.log_probs(data, rows)
    expected = torch.autograd.grad(-(weights[rows[:, 0]] * log_probs).mean(), learner.parameters)
    metrics = make_update(policy, learner, data, weights, dict.fromkeys(range(4), policy.steps.counted))
    for parameter, gradient in zip(learner.parameters, expected, strict=True):
        assert (parameter.grad - gradient).norm() < 1e-4 * gradient.norm() + 1e-7
    assert metrics["clipfrac"] == 0 and metrics["approx_kl"] < 1e-9 and metrics["skipped"] == 0


def test_images_depend_on_the_sample_alone_and_guidance_on_the_prompt(tmp_path: Path) -> None:
    policy = policy_of(tiny_directory(tmp_path), "ddim")
    four, two = sampled(policy), sampled(policy, 2)
    assert torch.allclose(four.latents[:2], two.latents, atol=1e-6)
    assert not torch.allclose(four.latents[:2], sampled(policy, 2, step=1).latents)
    without = policy_of(tmp_path, "ddim", guidance=1.0)
    assert not torch.allclose(sampled(without).latents, four.latents)


def test_the_kl_term_pulls_back_to_the_reference(tmp_path: Path) -> None:
    import copy

    policy = policy_of(tiny_directory(tmp_path), "ddim", kl_coef=10.0)
    first, predict = copy.deepcopy(policy.pipeline.net), policy.pipeline.predict
    policy = Policy.of(policy.pipeline, policy.sampler, policy.loss, 5, lambda *given: predict(*given, net=first))
    data, zeros, places = sampled(policy), torch.zeros(4), dict.fromkeys(range(4), policy.steps.counted)
    with torch.no_grad():
        policy.pipeline.net.proj_out_2.weight.add_(0.01)
    learner = DiffusionLearner(policy.pipeline.net, OptimizerConfig(lr=1e-4))
    distances = [make_update(policy, learner, data, zeros, places)["kl_to_reference"] for _ in range(4)]
    assert distances[0] > 0 and distances[-1] < distances[0]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Makes the same updates with one rank and with two. Seven images are uneven on two ranks: the second one has fewer
    in the first update. Sharded nets get eight."""
    tmp = tmp_path_factory.mktemp("worlds")
    dit, unet = (str(tiny_directory(tmp / net, net)) for net in ("dit", "unet"))
    lora = {"lora": {"rank": 2, "alpha": 4.0}, "micro_batch": 7}
    found = {}
    for ranks in (1, 2):
        two = ranks == 2
        cases = [
            {"name": "plain", "model": dit, "images": 7, "train": {"micro_batch": 2 if two else 64}, "at_once": 3},
            {"name": "sharded", "model": dit, "images": 8, "train": {"micro_batch": 5, "sharded": two}},
            {"name": "unet", "model": unet, "images": 8, "train": {"micro_batch": 9, "sharded": two, "recompute": two}},
            {"name": "lora", "model": dit, "images": 8, "train": {**lora, "sharded": two}, "kl_coef": 0.1},
            {"name": "kl", "model": dit, "images": 8, "train": {"micro_batch": 5, "sharded": two}, "kl_coef": 0.1},
        ]
        asked = [case for case in cases if case["name"] in CASES]
        with_ranks(ranks, "diffusion.py", tmp / "out.pt", json.dumps(asked))
        found[ranks] = torch.load(tmp / "out.pt")
    return found


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_ranks_and_micro_batch_makes_the_same_update(worlds: dict[int, Any], case: str) -> None:
    """Any number of ranks and any micro-batch give the same rewards, metrics and optimizer state, with the whole net on
    every rank or sharded by FSDP2."""
    one, two = (worlds[ranks][case] for ranks in (1, 2))
    for mine, other in zip(one["rewards"], two["rewards"], strict=True):
        assert torch.allclose(mine, other, atol=1e-6)
    for mine, other in zip(one["metrics"], two["metrics"], strict=True):
        assert mine == pytest.approx(other, rel=2e-3, abs=1e-6)
    for name, first in one["first"].items():
        limit = (1e-4 if case == "unet" else 2e-5) * float(first.abs().max()) + 1e-9  # convolutions round differently
        assert torch.allclose(first, two["first"][name], rtol=1e-4, atol=limit), f"the first gradient of {name}"
        moved = (one["weights"][name] - two["weights"][name]).abs()  # three steps of 1e-3, if a gradient's sign differs
        assert moved.mean() < (1e-4 if case == "unet" else 1e-5), name
        assert case == "unet" or moved.max() < 2e-4, name
    assert one["updates"] == two["updates"] == 3


def test_a_shared_net_lies_on_the_ranks_in_parts(worlds: dict[int, Any]) -> None:
    for case in ("unet", "lora", *slow_cases("sharded")):
        whole = sum(value.numel() for value in worlds[2][case]["weights"].values())
        assert worlds[1][case]["own"] == whole and worlds[2][case]["own"] < 0.7 * whole


def test_of_adapters_nothing_else_is_trained_or_kept(worlds: dict[int, Any], tmp_path: Path) -> None:
    found = worlds[2]["lora"]
    assert found["weights"] and all(".lora_" in name for kind in ("weights", "exp_avg") for name in found[kind])
    assert sum(value.numel() for value in found["weights"].values()) < 1000
    first = policy_of(tiny_directory(tmp_path), "ddim").pipeline.net.state_dict()
    moved = [name for name, value in first.items() if not torch.equal(value, found["whole"][_in_lora(name)])]
    assert not moved, "the net itself is frozen"
    assert all(value.abs().max() > 0 for name, value in found["weights"].items() if "lora_B" in name)
    assert found["metrics"][0]["kl_to_reference"] == 0 < found["metrics"][-1]["kl_to_reference"]


def _in_lora(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{layer}.base_layer.{kind}" if layer.endswith(("to_q", "to_k", "to_v", "to_out.0")) else name


def test_steps_are_chosen_by_the_image() -> None:
    chosen = chosen_steps(range(10), 0.5, (1, 2, 3))
    assert len(set(chosen)) == 5 and chosen == chosen_steps(range(10), 0.5, (1, 2, 3))
    assert chosen != chosen_steps(range(10), 0.5, (1, 2, 4)) and len(chosen_steps([7], 0.1, (1,))) == 1


def test_the_learning_rate_warms_up_and_decays() -> None:
    cfg = OptimizerConfig(lr=1.0, warmup_steps=2, decay="linear", decay_steps=6, min_lr=0.2)
    assert [round(cfg.learning_rate(k), 6) for k in (1, 2, 3, 4, 6, 7, 9)] == [0.5, 1.0, 1.0, 0.8, 0.4, 0.2, 0.2]


def test_an_update_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    policy = policy_of(tiny_directory(tmp_path), "ddim")
    learner = DiffusionLearner(policy.pipeline.net, OptimizerConfig(lr=1e-2))
    before = [parameter.detach().clone() for parameter in learner.parameters]
    weights = torch.tensor([float("nan"), 1.0, 1.0, 1.0])
    metrics = make_update(policy, learner, sampled(policy), weights, dict.fromkeys(range(4), policy.steps.counted))
    assert metrics["skipped"] == 1 and learner.updates == 0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True))


def test_metrics_are_of_the_updates_that_were_made(tmp_path: Path) -> None:
    """Metrics are those of the applied updates; one of the two is skipped."""
    policy = policy_of(tiny_directory(tmp_path), "ddim")
    learner, stats = DiffusionLearner(policy.pipeline.net, OptimizerConfig(lr=1e-3)), StepStats(1)
    sizes: dict[str, Any] = {"batch": SimpleNamespace(inner_epochs=1, timestep_fraction=1.0)}
    sizes |= {"images_per_update": 2, "images_per_step": 4, "advantage": SimpleNamespace(clip=5)}
    cfg = SimpleNamespace(run=SimpleNamespace(seed=1), **sizes)
    updates = Updates(tmp_path, 2, SilentRecorder(), writes=False)
    work: Any = SimpleNamespace(cfg=cfg, policy=policy, learner=learner, updates=updates)
    _learn(work, 0, StepSamples(sampled(policy), [], []), torch.tensor([float("nan"), 1.0, -1.0, 1.0]), stats)
    assert learner.updates == 1 and stats.metrics["actor/skipped"] == 1
    assert all(math.isfinite(stats.metrics[f"actor/{name}"]) for name in ("loss", "grad_norm", "approx_kl", "clipfrac"))


def test_all_is_drawn_before_a_sample_that_went_wrong_is_named(tmp_path: Path) -> None:
    """All images are generated before an invalid sample is named. Ranks that share a net must call it equally often."""
    policy, seen = policy_of(tiny_directory(tmp_path), "ddim"), []
    conditioning = policy.pipeline.conditioning.encode([PromptRow("", 0, {})] * 8)

    def refuse(ids: range, images: torch.Tensor) -> None:
        seen.append(ids)
        raise ValueError(f"no image {ids[0]}")

    with pytest.raises(ValueError, match="no image 0"):
        draw(policy.pipeline, policy.steps, policy.sampler, range(8), conditioning, (1, 0), refuse)
    assert seen == [range(3), range(3, 6), range(6, 8)]
    with torch.no_grad():
        policy.pipeline.net.proj_out_2.bias.fill_(float("nan"))
    with pytest.raises(DiffusionError, match="^sample 0: a latent is not finite"):
        draw(policy.pipeline, policy.steps, policy.sampler, range(8), conditioning, (1, NO_STEP), refuse)


def test_prompts_that_begin_alike_have_names_of_their_own() -> None:
    long = "a cat " * 20
    names = prompt_names(["a dog", long + "red", "a dog", long + "blue"])
    assert list(names.values()) == [f"reward_by_prompt/{text}" for text in ("a dog", long[:60], f"{long[:60]} (2)")]


def test_what_a_net_does_not_have_is_refused(tmp_path: Path) -> None:
    """Refuses layers for adapters that the net does not have, and checkpoints with other weights."""
    model, train = DiffusionModelConfig(path=str(tiny_directory(tmp_path))), DiffusionTrainConfig
    for target, said in (
        ("to_x", "DiTTransformer2DModel has no layer 'to_x'"),
        ("proj", "'proj' is a Conv2d, not linear"),
    ):
        with pytest.raises(ValueError, match=said):
            Pipeline.load(model, train.model_validate({"lora": {"targets": (target,)}}))
    small, large = (
        DiffusionLearner(Pipeline.load(model, train.model_validate({"lora": {"rank": rank}})).net, OptimizerConfig())
        for rank in (2, 3)
    )
    small.check_state(small.state_dict())
    with pytest.raises(ValueError, match="names or shapes of the checkpoint's trained weights differ"):
        small.check_state(large.state_dict())
