"""Runs that train adapters: PPO and DPO against the actor without them, after a death, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_configs import DENSE
from safetensors.torch import load_file, save_file

from mrl import cli
from tests.conftest import TinyModels
from tests.test_dpo import write
from tests.test_resume import difference, results, train, train_and_kill
from tests.train_tools import Train, write_config

LORA = {"rank": 4, "alpha": 8}
PPO: dict[str, Any] = {
    "actor": {"parallel": {"tensor": 2}, "optimizer": {"lr": 5e-3}, "lora": LORA},
    "critic": {"parallel": {"pipeline": 2}, "optimizer": {"lr": 5e-3}, "lora": LORA | {"dora": True}},
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "samples_per_minibatch": 4},
    "algorithm": {"adv_estimator": "gae", "kl": {"use_in_loss": True, "coef": 0.1}},
    "rollout": {"engine": "transformers"},
    "sync": {"verify": "checksum"},
    "checkpoint": {"every_steps": 2, "weights_every_steps": 2, "export_hf": True},
}


@pytest.fixture(scope="module")
def ppo(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and the same killed after step 3 and started again."""
    folder = tmp_path_factory.mktemp("lora_ppo")
    config = write_config(folder, tiny_models("llama", tied=True), **PPO)
    train(folder, config, "run.name=whole", "run.steps=4")
    train_and_kill(folder, folder / "runs/killed", config, "run.name=killed", "run.steps=50")
    train(folder, config, "run.name=killed", "run.steps=4")
    return folder


def test_killed_and_started_again_is_the_same_run_to_the_bit(ppo: Path) -> None:
    whole, killed = (ppo / "runs" / name for name in ("whole", "killed"))
    assert results(killed) == results(whole) and list(results(whole)) == [1, 2, 3, 4]
    assert set(difference(whole, killed).values()) == {0.0}


def test_the_policy_moves_away_from_the_actor_without_adapters(ppo: Path) -> None:
    rows = results(ppo / "runs/whole")
    assert 0 < rows[1]["kl/ref"] < rows[4]["kl/ref"]


def test_the_engine_draws_with_the_merged_weights(ppo: Path) -> None:
    for row in results(ppo / "runs/whole").values():
        assert row["mismatch/mean_abs"] < 1e-4


def test_what_is_exported_is_adapters_and_at_the_end_the_whole_model_too(ppo: Path, tiny_models: TinyModels) -> None:
    run, base = ppo / "runs/whole", tiny_models("llama", tied=True)
    assert {path.name for path in run.glob("*_step_*")} == {"adapter_step_2", "adapter_step_4"}
    assert (
        load_file(run / "adapter_step_4/adapter_model.safetensors").keys()
        == load_file(run / "adapter/adapter_model.safetensors").keys()
    )
    assert cli.main(["merge", str(base), str(run / "adapter"), str(run / "merged")]) == 0
    merged, whole = load_file(run / "merged/model.safetensors"), load_file(run / "hf/model.safetensors")
    for name, tensor in whole.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_run_does_not_go_on_beside_other_weights(ppo: Path, tiny_models: TinyModels) -> None:
    """Of the same shapes, in the same place."""
    file = tiny_models("llama", tied=True) / "model.safetensors"
    before = file.read_bytes()
    save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    try:
        with Train(ppo, ppo / "config.yaml", "run.name=whole", "run.steps=5") as run:
            assert run.wait(120) != 0
            assert "actor: the digest of the adapters' base weights is" in run.terminal
    finally:
        file.write_bytes(before)


def test_dpo_against_the_actor_without_adapters_is_dpo_against_a_frozen_copy(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    model = tiny_models("llama")
    actor = {"optimizer": {"lr": 1e-2}, "max_tokens_per_microbatch": 40, "lora": LORA}
    config = write(tmp_path, model, actor=actor, checkpoint={})
    train(tmp_path, config, "run.name=off", "run.steps=3")
    train(tmp_path, config, "run.name=copy", "run.steps=3", f"ref.path={model}")
    off, copy = (results(tmp_path / "runs" / name) for name in ("off", "copy"))
    assert off == copy
    assert off[1]["dpo/first_gap"] < 1e-5 and off[3]["rewards/margins"] > off[1]["rewards/margins"]


EXPERTS = {
    **DENSE,
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
}
REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no such layer": (
        ("actor.lora.targets=[q_proj, w1]",),
        ("actor.lora.targets", "no linear layer w1, but q_proj, k_proj, v_proj, o_proj, gate_proj"),
    ),
    "no layer": (("actor.lora={targets: []}",), ("actor.lora.targets", "names no layer")),
    "weights from nowhere": (
        ("actor.lora={}", "model.from_scratch=true"),
        ("actor.lora", "model.from_scratch", "need base weights on disk"),
    ),
    "fp8": (
        ("actor.lora={}", "actor.precision.fp8={recipe: current, emulate: true}"),
        ("actor.lora", "actor.precision.fp8.recipe", "not with current"),
    ),
    "a layout of the reference": (
        ("actor.lora={}", "algorithm.kl={use_in_loss: true}", "ref.max_tokens_per_microbatch=64"),
        ("ref.max_tokens_per_microbatch", "actor.lora", "the reference is the actor without its adapters"),
    ),
    "adapters to be sent, and none": (
        ("sync.lora=adapter",),
        ("sync.lora", "actor.lora", "the actor trains all weights"),
    ),
    "an engine for whole weights": (
        ("actor.lora={}", "sync.lora=adapter", "rollout.engine=transformers"),
        ("sync.lora", "rollout.engine", "takes whole weights only"),
    ),
    "magnitudes that SGLang would leave out": (
        ("actor.lora={dora: true}", "sync.lora=adapter"),
        ("sync.lora", "actor.lora.dora", "SGLang does not support DoRA"),
    ),
    "memory that nothing fills again": (
        ("actor.lora={}", "sync.lora=adapter", "rollout.release=all"),
        ("sync.lora", "rollout.release", "does not restore the released base weights"),
    ),
    "buckets of adapters": (
        ("actor.lora={}", "sync.lora=adapter", "sync.bucket_mib=3"),
        ("sync.bucket_mib", "sync.lora", "no effect"),
    ),
    "a frozen critic": (
        ("algorithm.adv_estimator=gae", "critic={frozen: true, lora: {}}"),
        ("critic.lora", "critic.frozen", "no effect"),
    ),
}
REFUSED_EXPERTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "experts that are sent": (
        ("actor.lora={}", "actor.layers=local", "sync.lora=adapter"),
        ("sync.lora", "actor.lora.targets", "adapters of experts can only be synced merged"),
    ),
    "experts of joined layers": (("actor.lora={}",), ("actor.lora.targets", "actor.layers", "need local layers")),
    "experts that are cut": (
        ("actor.lora={}", "actor.layers=local", "actor.parallel={tensor: 2}"),
        ("actor.parallel.expert_tensor", "actor.lora.targets", "need 1, not 2"),
    ),
}


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_EXPERTS])
def test_what_contradicts_adapters_is_refused_by_both_keys(
    case: str, tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    if case in REFUSED:
        model = tiny_models("llama")
    else:
        model.mkdir()
        (model / "config.json").write_text(json.dumps(EXPERTS))
    overrides, said = (REFUSED | REFUSED_EXPERTS)[case]
    config = write_config(tmp_path, model)
    assert cli.main(["plan", str(config), "--gpu", "none", *overrides]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert all(part in shown for part in said), shown
