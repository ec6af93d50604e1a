"""Plain pre-norm decoder: grouped-query attention, rotary embeddings, a gated MLP.

Every family derives from it and states its differences in its own file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mrl import float32
from mrl.families.arch import ExpertArch, LayerArch, ModelArch, VisionArch
from mrl.families.keys import Keys, UnsupportedModel, short
from mrl.families.rope import refuse_rope, rotary_dim
from mrl.families.rows import BODY, MappingTable, attention, dense_mlp, prefixes

MAX_WIDTH, MAX_VOCAB, MAX_LAYERS, MAX_HEADS = 1 << 20, 1 << 24, 4096, 1 << 14  # beyond these a number is a mistake
MAX_POSITIONS = 1 << 30


class Decoder:
    """Family of models: reads config.json, refuses unsupported keys by name, and lists the rows of its layers.

    name: `model_type` in config.json; architecture: its `...ForCausalLM`
    """

    name: str
    architecture: str
    width_key = "intermediate_size"  # what config.json calls the width of the MLP, or of one expert's
    defaults: Mapping[str, Any] = {}  # transformers' defaults of missing keys, if different from Llama's
    scorer: str | None = None  # name prefix of its scorers; None: its policy's
    qkv_bias = False
    qk_norm = False
    activation_key, activation = "hidden_act", "silu"  # of the MLP's gate; the only supported one
    shifted_norms = False  # norms multiply by 1 + weight
    wide_norms = False  # norms multiply before they round to the model's dtype, not after
    norms_all_heads = False  # q and k norms are over all of a token's heads together
    norms_before = True  # the inputs of attention and MLP are normed
    sinks = False  # each head has a learned attention sink
    biases = False  # the attention output projection, the router and the experts have biases
    gate: str | None = None  # the gating function, if it is not activation(gate) * up
    norms_behind = False  # the results of attention and MLP are normed before they are added
    gated_attention = False  # each channel of the attention's result has a gate, behind its head's query
    scaled_embedding = False  # embeddings are multiplied by sqrt(hidden_size)
    local_only: str | None = None  # features that transformer-engine's layers lack, in words
    rotary_share: float | None = None  # default share of rotated channels; None: all, and no other share
    ignores_attention_bias = False  # transformers' code of the family does not read the key
    unpacks: tuple[str | None, ...] = ()  # readable quantisation formats, by the hub's names
    ignores_auto_map = False  # code in the model's directory, which is never run, is not needed
    draft_body: str | None = None  # the hub's prefix of their tensors, where these are not layers behind the last one
    draft_keys: tuple[str, ...] = ()  # keys that count multi-token prediction layers, which are copied, not trained
    # SGLang (0.5.23) gives its score head a bias, random unless the checkpoint has one; transformers' has none
    engine_score_bias = False
    engine_cuts_vocab = True  # SGLang cuts its embedding over its ranks, and rounds its rows up
    engine_needs_gpu: str | None = None  # why SGLang serves the family on GPUs only, in words
    body = BODY  # the hub's prefix of the decoder's tensors

    def unavailable(self) -> str | None:
        """Returns why no model of the family can be built with the installed packages, and the remedy."""
        return None

    def keys(self, config: dict[str, Any], where: str) -> Keys:
        """Returns the keys of a config.json, completed with the family's defaults as in transformers."""
        return Keys({**self.defaults, **config}, where)

    def read(self, keys: Keys) -> ModelArch:
        """Returns the shape that config.json describes, with every value checked.

        Raises UnsupportedModel, naming the key, for values of a wrong kind, zero or absurd.
        """
        vocabulary, hidden = keys.size("vocab_size", MAX_VOCAB), keys.size("hidden_size", MAX_WIDTH)
        heads = keys.size("num_attention_heads", MAX_HEADS)
        experts, head_dim = self.experts(keys), self._head_dim(keys, hidden, heads)
        return ModelArch(
            family=self.name,
            vocab_size=vocabulary,
            hidden_size=hidden,
            layers=self.layers(keys, keys.size("num_hidden_layers", MAX_LAYERS)),
            num_heads=heads,
            num_kv_heads=_kv_heads(keys, heads),
            head_dim=head_dim,
            norm_eps=keys.number("rms_norm_eps", 1e-6, float32.TINY, 1.0),
            tied_embeddings=keys.flag("tie_word_embeddings", False),
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            max_positions=positions(keys),
            initializer_range=keys.number("initializer_range", 0.02, 0.0, 1e3),
            eos_token_ids=keys.token_ids("eos_token_id", vocabulary),
            experts=experts,
            rotary_dim=None if self.rotary_share is None else rotary_dim(keys, head_dim, self.rotary_share),
        )

    def layers(self, keys: Keys, count: int) -> tuple[LayerArch, ...]:
        """Returns the `count` layers, from the first to the last."""
        return (LayerArch(keys.size(self.width_key, MAX_WIDTH)),) * count

    def experts(self, keys: Keys) -> ExpertArch | None:
        """Returns the properties of the expert layers; None without any."""
        return None

    def refuse(self, keys: Keys) -> None:
        """Raises UnsupportedModel, naming the keys under which mrl's forward would silently differ from
        transformers'.
        """
        wrong = list(self.differences(keys))
        if wrong:
            raise UnsupportedModel(f"{keys.where}: not supported for {self.name}: " + "; ".join(wrong))
        self.check_rope(keys)

    def check_rope(self, keys: Keys) -> None:
        """Raises UnsupportedModel for rotary embeddings that `mrl.models.rope` does not support."""
        refuse_rope(keys, partial=self.rotary_share is not None)

    def differences(self, keys: Keys) -> Iterator[str]:
        """Yields the complaints of `refuse`, one text a key."""
        if keys["model_type"] != self.name:
            yield f"model_type={short(keys['model_type'])} (architectures say {self.name})"
        if keys.content.get(self.activation_key, self.activation) != self.activation:
            yield f"{self.activation_key}={short(keys[self.activation_key])} (only {self.activation})"
        if keys["attention_dropout"]:
            yield f"attention_dropout={short(keys['attention_dropout'])} (only 0)"
        if keys["attention_bias"] and not self.ignores_attention_bias:
            yield "attention_bias=true (a bias of o_proj)"
        if keys["mlp_bias"]:
            yield "mlp_bias=true"
        if keys["use_sliding_window"]:
            yield "use_sliding_window=true"
        if not keys.content.get("is_causal", True):
            yield "is_causal=false (only causal attention)"
        if keys["per_layer_config"]:
            yield "per_layer_config (keys that differ by layer)"
        yield from self.other_layers(keys)
        if keys["quantization_config"] and packing(keys) not in self.unpacks:
            yield "quantization_config (train from unquantized weights)"
        if keys["auto_map"] and not self.ignores_auto_map:
            yield "auto_map (custom code, which mrl never runs)"

    def other_layers(self, keys: Keys) -> Iterator[str]:
        """Yields the difference of layers without full attention."""
        if keys["layer_types"] not in (None, ["full_attention"] * keys.size("num_hidden_layers", MAX_LAYERS)):
            yield f"layer_types={short(keys['layer_types'])} (only full_attention, for every layer)"

    def tower_rows(self, vision: VisionArch) -> MappingTable:
        """Returns the parameters of the family's vision tower, under global names."""
        return {}

    def engine_config(self, keys: Keys) -> Mapping[str, Any]:
        """Returns the keys and values that SGLang needs in config.json in addition to, or other than, transformers'."""
        return {}

    def engine_lacks(self, arch: ModelArch, tensor: int, *, quantized: bool) -> str | None:
        """Returns why SGLang cannot serve the model on `tensor` ranks, or in fp8, and the remedy; None if it can."""
        return None

    def in_memory(self, name: str) -> str:
        """Returns transformers' name of a hub tensor in a loaded model."""
        return name

    def in_engine(self, name: str) -> str:
        """Returns SGLang's name of a hub tensor that is not joined with others."""
        return name

    def layer_rows(self, arch: ModelArch, index: int) -> MappingTable:
        """Returns Megatron's parameters of layer `index` (from 0), under global names, in the order of the forward
        pass.
        """
        m, h = prefixes(index)
        return {**attention(arch, m, h), **self.ffn_rows(arch, arch.layers[index], m, h)}

    def ffn_rows(self, arch: ModelArch, layer: LayerArch, m: str, h: str) -> MappingTable:
        """Returns the parameters of the feed-forward part alone."""
        return dense_mlp(arch.hidden_size, layer.ffn_size, m, h)

    def _head_dim(self, keys: Keys, hidden: int, heads: int) -> int:
        if keys["head_dim"] is None and hidden % heads:
            raise keys.wrong("hidden_size", f"a multiple of num_attention_heads ({heads}) where head_dim is not given")
        found = keys.size("head_dim", MAX_WIDTH, hidden // heads)
        if found % 2:
            raise UnsupportedModel(f"{keys.where}: a head has {found} channels; rotary embeddings need an even number")
        return found


def packing(keys: Keys) -> str | None:
    """Returns config.json's name of the quantisation format; None for plain weights, or if unnamed."""
    found = keys.table("quantization_config")
    return None if found is None else str(found["quant_method"])


def positions(keys: Keys) -> int:
    """Returns the longest sequence in tokens."""
    return keys.size("max_position_embeddings", MAX_POSITIONS, 2048)


def short_window(keys: Keys) -> Iterator[str]:
    """Yields the difference of a sliding window shorter than the longest sequence, for families that always apply
    one.
    """
    if keys["sliding_window"] is not None:
        window = keys.size("sliding_window", MAX_POSITIONS)
        if window < positions(keys):
            yield f"sliding_window={window} below max_position_embeddings"


def _kv_heads(keys: Keys, heads: int) -> int:
    found = keys.size("num_key_value_heads", MAX_HEADS, heads)
    if heads % found:
        raise keys.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    return found
