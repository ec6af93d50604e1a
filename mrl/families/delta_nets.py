"""Common base of Qwen3-Next and Qwen3.5: gated delta nets, and in every n-th layer attention with gated outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata

from mrl.families.arch import DeltaNetArch, LayerArch, ModelArch
from mrl.families.decoder import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Decoder
from mrl.families.keys import Keys, UnsupportedModel
from mrl.families.rope import FULL
from mrl.families.rows import MappingTable, attention, delta_net, prefixes

LINEAR = "linear_attention"
INTERVAL = 4  # full attention is in every so many layers, where config.json does not say
MAX_KERNEL = 1 << 10
RELEASE = (0, 19)  # of megatron-core, the first with packed gated delta nets


class DeltaNetDecoder(Decoder):
    """projections, by_head: as for `rows.delta_net`"""

    qk_norm = True
    shifted_norms = True
    gated_attention = True
    rotary_share = 0.25
    local_only = "gated delta nets"
    draft_body = "mtp."
    projections: tuple[tuple[str, int], ...]
    by_head = False

    def unavailable(self) -> str | None:
        try:
            installed = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            return None
        if tuple(map(int, installed.split(".")[:2])) >= RELEASE:
            return None
        return (
            f"its linear attention has no packed form in megatron-core {installed}: use Python 3.12, for which pip "
            "installs 0.19, or train a Qwen3 or Qwen3-MoE model instead"
        )

    def read(self, keys: Keys) -> ModelArch:
        key_heads = keys.size("linear_num_key_heads", MAX_HEADS, 16)
        value_heads = keys.size("linear_num_value_heads", MAX_HEADS, 32)
        if value_heads % key_heads:
            raise keys.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
        delta = DeltaNetArch(
            key_heads=key_heads,
            value_heads=value_heads,
            key=keys.size("linear_key_head_dim", MAX_WIDTH, 128),
            value=keys.size("linear_value_head_dim", MAX_WIDTH, 128),
            kernel=keys.size("linear_conv_kernel_dim", MAX_KERNEL, 4),
        )
        found = super().read(keys)
        return replace(found, delta=delta if any(layer.delta for layer in found.layers) else None)

    def layers(self, keys: Keys, count: int) -> tuple[LayerArch, ...]:
        layers, kinds = super().layers(keys, count), keys["layer_types"]
        if kinds is None:
            interval = keys.size("full_attention_interval", MAX_LAYERS, INTERVAL)
            kinds = [LINEAR if (index + 1) % interval else FULL for index in range(count)]
        if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (LINEAR, FULL) for kind in kinds):
            raise keys.wrong("layer_types", f"{LINEAR} or {FULL} for each of the {count} layers")
        if FULL not in kinds:
            raise UnsupportedModel(f"{keys.where}: not supported for {self.name}: a model without {FULL} layers")
        return tuple(replace(layer, delta=kind == LINEAR) for layer, kind in zip(layers, kinds, strict=True))

    def other_layers(self, keys: Keys) -> Iterator[str]:
        return iter(())

    def layer_rows(self, arch: ModelArch, index: int) -> MappingTable:
        (m, h), layer = prefixes(index), arch.layers[index]
        if layer.delta:
            rows = delta_net(arch, m, h, self.projections, by_head=self.by_head)
        else:
            rows, qkv = attention(arch, m, h), m + "self_attention.linear_qkv.weight"
            (width, hidden), *others = rows[qkv].shapes
            rows[qkv] = replace(rows[qkv], shapes=((2 * width, hidden), *others))  # each head's gate is behind it
        return rows | self.ffn_rows(arch, layer, m, h)

    def engine_lacks(self, arch: ModelArch, tensor: int, *, quantized: bool) -> str | None:
        """Returns that mrl has no names for SGLang's joined projections of gated delta nets."""
        return f"is not supported with the gated delta nets of {self.name}: set rollout.engine: transformers"
