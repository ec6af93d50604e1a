"""Model families that exist only in tests: the one of the recipe in docs/extending.md, and one with unlike layers."""

from __future__ import annotations

from transformers import AutoConfig, LlamaConfig

from mrl.families import Decoder, Keys, LayerArch
from mrl.families.decoder import MAX_WIDTH
from mrl.families.qwen3_moe import Qwen3Moe


class Toy(Decoder):
    """Toy: Llama with another word for the width of its MLP."""

    name, architecture = "toy", "ToyForCausalLM"
    width_key = "ffn_dim"


class EverySecond(Qwen3Moe):
    """Qwen3-MoE with a dense MLP, of another width, in every second layer."""

    def layers(self, keys: Keys, count: int) -> tuple[LayerArch, ...]:
        step = keys.size("decoder_sparse_step", count, 1)
        dense, experts = keys.size("intermediate_size", MAX_WIDTH), keys.size("moe_intermediate_size", MAX_WIDTH)
        return tuple(LayerArch(dense) if (i + 1) % step else LayerArch(experts, experts=True) for i in range(count))


TOYS: dict[str, Decoder] = {"toy": Toy(), "qwen3_moe": EverySecond()}


class ToyConfig(LlamaConfig):
    """The configuration class that transformers needs for the toy family."""

    model_type = "toy"
    attribute_map = {"ffn_dim": "intermediate_size"}


def add_toys() -> None:
    """Registers the toy families in this process permanently, for the ranks of a world. Tests add TOYS to FAMILIES by
    monkeypatch instead."""
    from mrl.families import FAMILIES

    FAMILIES.update(TOYS)
    AutoConfig.register("toy", ToyConfig)
