"""Weights and operations of a model from its weight table, against transformers and torch's own count."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from mrl.families import load_arch
from mrl.families.flops import ForwardFlops, num_parameters
from tests.conftest import TinyModels
from tests.helpers.tiny import FAMILIES, MOE_FAMILIES, STACKED_FAMILIES

DENSE = [family for family in FAMILIES if family not in MOE_FAMILIES + STACKED_FAMILIES]
LENGTH = 64  # a whole chunk of gated delta nets


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_as_many_as_transformers_has(family: str, tied: bool, tiny_models: TinyModels) -> None:
    path = tiny_models(family, tied=tied, weights=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    arch = load_arch(path)
    assert num_parameters(arch) == sum(parameter.numel() for parameter in model.parameters())
    without = num_parameters(arch) - (0 if tied else arch.vocab_size * arch.hidden_size)
    assert num_parameters(arch, "critic") == without + arch.hidden_size, "a value head in place of the output layer"


@pytest.mark.parametrize("family", DENSE)
def test_operations_are_those_that_torch_counts(family: str, tiny_models: TinyModels) -> None:
    """The operations equal torch's count of all pairs of tokens; a model needs the causal half."""
    path = tiny_models(family, weights=False)
    config = AutoConfig.from_pretrained(path)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, LENGTH, dtype=torch.long), use_cache=False)
    ours = ForwardFlops.of(load_arch(path)).total(LENGTH, LENGTH**2, LENGTH)
    assert ours == pytest.approx(counter.get_total_flops(), rel=2e-3)  # torch also counts the rotary angles


def test_a_token_meets_its_own_experts_alone(tiny_models: TinyModels) -> None:
    all_of, some = (
        ForwardFlops.of(load_arch(tiny_models("mixtral", weights=False, num_experts_per_tok=count))) for count in (4, 2)
    )
    arch = load_arch(tiny_models("mixtral", weights=False))
    assert arch.expert_width is not None
    one = 2 * 3 * arch.hidden_size * arch.expert_width * arch.num_layers
    assert all_of.per_token - some.per_token == 2 * one and all_of.per_pair == some.per_pair


def test_a_critic_has_one_output(tiny_models: TinyModels) -> None:
    arch = load_arch(tiny_models("llama", weights=False))
    assert ForwardFlops.of(arch, "critic").per_output == 2 * arch.hidden_size
    assert ForwardFlops.of(arch).per_output == 2 * arch.hidden_size * arch.vocab_size
