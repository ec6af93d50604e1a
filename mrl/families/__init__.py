"""The families of models: a file each, and a line in FAMILIES. Standard library only, since the `mrl` command reads
models before it imports anything large; what is common is in `decoder` and `experts`, the weights' names in `table`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrl.families.arch import Experts, Layer, ModelArch
from mrl.families.decoder import Decoder
from mrl.families.keys import Keys, UnsupportedModel
from mrl.families.llama import Llama
from mrl.families.mistral import Mistral
from mrl.families.mixtral import Mixtral
from mrl.families.qwen2 import Qwen2
from mrl.families.qwen3 import Qwen3
from mrl.families.qwen3_moe import Qwen3Moe
from mrl.foreign import check_links, read_json

__all__ = [
    "FAMILIES",
    "VALUE_HEAD_SUFFIX",
    "Decoder",
    "Experts",
    "Keys",
    "Layer",
    "ModelArch",
    "UnsupportedModel",
    "architecture_of",
    "engine_arch",
    "is_reward_model",
    "load_arch",
    "read_hf_config",
]

FAMILIES: dict[str, Decoder] = {
    family.name: family
    for family in (
        Llama(),
        Mistral(),
        Mixtral(),
        Qwen2(),
        Qwen3(),
        Qwen3Moe(),
    )
}
VALUE_HEAD_SUFFIX = "ForSequenceClassification"  # the same decoder with a score head: a critic or reward model


def load_arch(path: str | Path) -> ModelArch:
    """ModelArch of a Hugging Face directory.

    Raises UnsupportedModel for an architecture that no family has, for any key that would make our forward differ from
    transformers' (sliding windows, attention dropout, projection biases, other activations), and for values of a wrong
    kind, zero or absurd; FileNotFoundError without config.json.
    """
    config, where = read_hf_config(path), f"{path}/config.json"
    name, family = architecture_of(config, where), _family(config, where)
    if family is None:
        supported = ", ".join(sorted(family.architecture for family in FAMILIES.values()))
        raise UnsupportedModel(f"{where}: architecture {name[:80]} has no weight table; supported: {supported}")
    keys = Keys(config, where)
    family.refuse(keys)
    return family.read(keys)


def engine_arch(path: str | Path) -> ModelArch:
    """As `load_arch`, for starting an engine: nothing is refused, and an architecture that no family has is read as a
    plain decoder's. The engine says itself what it does not serve."""
    config, where = read_hf_config(path), f"{path}/config.json"
    family = _family(config, where)
    if family is None:
        family = Decoder()
        family.name = str(config.get("model_type"))
    return family.read(Keys(config, where))


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """config.json of a model directory. Raises UnsupportedModel if it is no JSON object, or if files of the directory
    are links out of it: what follows reads them (tokenizer, weights, templates)."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: model.path must be a Hugging Face model directory")
    try:
        check_links(Path(path))
        config = read_json(file)
    except ValueError as error:
        raise UnsupportedModel(str(error)) from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{file} holds a {type(config).__name__}, not an object with keys")
    return config


def is_reward_model(path: str | Path) -> bool:
    """Whether a Hugging Face directory says of itself that it has a score head in place of an output layer."""
    return architecture_of(read_hf_config(path)).endswith(VALUE_HEAD_SUFFIX)


def architecture_of(config: dict[str, Any], where: str = "config.json") -> str:
    """The first name under `architectures`. Raises UnsupportedModel if that is no list of names."""
    names = config.get("architectures") or ["(none)"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedModel(f"{where}: architectures must be a list of names, not {str(names)[:60]!r}")
    return str(names[0])


def _family(config: dict[str, Any], where: str) -> Decoder | None:
    name = architecture_of(config, where).replace(VALUE_HEAD_SUFFIX, "ForCausalLM")
    return next((family for family in FAMILIES.values() if family.architecture == name), None)
