"""Runs with LoRA adapters: PPO and DPO with the adapter-free actor as reference, resuming, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl import cli
from tests.conftest import TinyModels
from tests.helpers.dpo_config import write
from tests.helpers.runs import difference, results, train, train_and_kill
from tests.helpers.train_tools import Train, write_config

pytestmark = pytest.mark.long

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
    """Runs PPO with adapters and returns its folder."""
    folder = tmp_path_factory.mktemp("lora_ppo")
    config = write_config(folder, tiny_models("llama", tied=True), **PPO)
    train(folder, config, "run.name=whole", "run.steps=4")
    return folder


@pytest.mark.slow
def test_killed_and_started_again_is_the_same_run_to_the_bit(ppo: Path) -> None:
    """A run killed after step 3 resumes bit for bit."""
    config, whole, killed = ppo / "config.yaml", ppo / "runs/whole", ppo / "runs/killed"
    train_and_kill(ppo, killed, config, "run.name=killed", "run.steps=50")
    train(ppo, config, "run.name=killed", "run.steps=4")
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


@pytest.mark.slow
def test_a_run_does_not_go_on_beside_other_weights(ppo: Path, tiny_models: TinyModels) -> None:
    """A run does not resume with other base weights, even of the same shapes and in the same directory."""
    file = tiny_models("llama", tied=True) / "model.safetensors"
    before = file.read_bytes()
    save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    try:
        with Train(ppo, ppo / "config.yaml", "run.name=whole", "run.steps=5") as run:
            assert run.wait(120) != 0
            assert "actor: the digest of the adapters' base weights is" in run.terminal
    finally:
        file.write_bytes(before)


@pytest.mark.slow
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
