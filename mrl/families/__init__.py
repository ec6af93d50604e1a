"""Model families: one file each, and a line in FAMILIES.

Standard library only, since the `mrl` command reads models before it imports anything large. Common parts are in
`decoder` and `experts`, weight names in `table`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mrl.families.arch import ExpertArch, LayerArch, ModelArch, VisionArch
from mrl.families.decoder import Decoder
from mrl.families.deepseek_v3 import DeepseekV3
from mrl.families.gemma3_text import Gemma3Text
from mrl.families.glm4_moe import Glm4Moe
from mrl.families.gpt_oss import GptOss
from mrl.families.keys import Keys, UnsupportedModel
from mrl.families.llama import Llama
from mrl.families.mistral import Mistral
from mrl.families.mixtral import Mixtral
from mrl.families.olmo2 import Olmo2
from mrl.families.olmo3 import Olmo3
from mrl.families.phi3 import Phi3
from mrl.families.qwen2 import Qwen2
from mrl.families.qwen2_5_vl import Qwen25VL
from mrl.families.qwen2_moe import Qwen2Moe
from mrl.families.qwen3 import Qwen3
from mrl.families.qwen3_5 import Qwen35MoeText, Qwen35Text
from mrl.families.qwen3_moe import Qwen3Moe
from mrl.families.qwen3_next import Qwen3Next
from mrl.families.qwen3_vl import Qwen3VL
from mrl.families.smollm3 import SmolLM3
from mrl.foreign import check_links, read_json

__all__ = [
    "FAMILIES",
    "GENERATES_SUFFIXES",
    "SCORES",
    "STEP_HEAD_SUFFIX",
    "VALUE_HEAD_SUFFIX",
    "Decoder",
    "ExpertArch",
    "Keys",
    "LayerArch",
    "ModelArch",
    "UnsupportedModel",
    "VisionArch",
    "architecture_of",
    "body_of",
    "engine_arch",
    "has_draft_layers",
    "hf_keys",
    "is_reward_model",
    "load_arch",
    "read_hf_config",
]

FAMILIES: dict[str, Decoder] = {
    family.name: family
    for family in (
        DeepseekV3(),
        Gemma3Text(),
        Glm4Moe(),
        GptOss(),
        Llama(),
        Mistral(),
        Mixtral(),
        Olmo2(),
        Olmo3(),
        Phi3(),
        Qwen2(),
        Qwen25VL(),
        Qwen2Moe(),
        Qwen3(),
        Qwen3Moe(),
        Qwen3Next(),
        Qwen3VL(),
        Qwen35MoeText(),
        Qwen35Text(),
        SmolLM3(),
    )
}
_CHUNKED = "its chunked attention is not supported: train a Llama 3 or Qwen3-MoE model instead"
_SPARSE = (
    "its sparse attention (DSA) is not supported: mrl has neither weights nor loss of the indexer that selects tokens, "
    "and trainer and engine could select different ones: train a DeepSeek-V3 or GLM-4.5 model instead"
)
_PICTURES = "its text model is: save transformers' AutoModelForCausalLM of it, with save_original_format=False"
UNSUPPORTED = {  # frequently requested architectures: the reason, and the alternative
    "Gemma3ForConditionalGeneration": "supported of Gemma 3: the text models (gemma3_text: 270M, 1B)",
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "Llama4ForCausalLM": _CHUNKED,
    "Llama4ForConditionalGeneration": _CHUNKED,
    "Qwen3_5ForConditionalGeneration": _PICTURES,
    "Qwen3_5MoeForConditionalGeneration": _PICTURES,
}
CONVERTED_DRAFTS = "mtp"  # folder of a converted model with the tensors of these layers
VALUE_HEAD_SUFFIX = "ForSequenceClassification"  # the same decoder with a score head: a critic or reward model
STEP_HEAD_SUFFIX = "ForTokenClassification"  # with one for every token: a model of process rewards
GENERATES_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration")  # with an output layer: a policy
SCORES = "regression"  # the problem_type of a head whose outputs are scores: several are an ensemble


def load_arch(path: str | Path) -> ModelArch:
    """Returns the ModelArch of a Hugging Face directory.

    Raises UnsupportedModel for an architecture without a family, for any key that would make mrl's forward differ from
    transformers' (sliding windows, attention dropout, projection biases, other activations), for values of a wrong
    kind, zero or absurd, and for a family that the installed megatron-core lacks; FileNotFoundError without
    config.json.
    """
    config, where = read_hf_config(path), f"{path}/config.json"
    name, family = architecture_of(config, where), _family(config, where)
    if family is None:
        supported = ", ".join(sorted(family.architecture for family in FAMILIES.values()))
        instead = UNSUPPORTED.get(name, f"supported: {supported}")
        raise UnsupportedModel(f"{where}: architecture {name[:80]} is not supported; {instead}")
    if (problem := family.unavailable()) is not None:
        raise UnsupportedModel(f"{where}: {problem}")
    keys = family.keys(config, where)
    family.refuse(keys)
    return replace(family.read(keys), score_heads=_score_heads(config), scores_steps=name.endswith(STEP_HEAD_SUFFIX))


def engine_arch(path: str | Path) -> ModelArch:
    """Returns the ModelArch for starting an engine, without refusing anything.

    An architecture without a family is read as a plain decoder; the engine itself reports what it does not serve.
    """
    config, where = read_hf_config(path), f"{path}/config.json"
    family = _family(config, where)
    if family is None:
        family = Decoder()
        family.name = str(config.get("model_type"))
    return family.read(family.keys(config, where))


def hf_keys(path: str | Path) -> Keys:
    """Returns the keys of a Hugging Face directory's config.json. Raises as `read_hf_config`."""
    return Keys(read_hf_config(path), f"{path}/config.json")


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """Returns config.json of a model directory.

    Raises UnsupportedModel if it is no JSON object, or if files of the directory are links out of it, because later
    steps read them (tokenizer, weights, templates); FileNotFoundError without config.json.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        message = f"{file} does not exist: expected a Hugging Face model directory"
        if str(path).count("/") == 1 and not Path(path).parent.is_dir():  # perhaps a name on the hub
            message += (
                f"; mrl downloads nothing: for a model of the hub, run hf download {path} --local-dir DIR and give DIR"
            )
        raise FileNotFoundError(message)
    try:
        check_links(Path(path))
        config = read_json(file)
    except ValueError as error:
        raise UnsupportedModel(str(error)) from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{file} must contain a JSON object, not {type(config).__name__}")
    return config


def is_reward_model(path: str | Path) -> bool:
    """Returns True if a Hugging Face directory declares a score head in place of an output layer."""
    return architecture_of(read_hf_config(path)).endswith((VALUE_HEAD_SUFFIX, STEP_HEAD_SUFFIX))


def has_draft_layers(path: str | Path) -> bool:
    """Returns True if a model directory has multi-token prediction layers: config.json counts them, or, in a family
    without such a key, the list of its weights names them."""
    config = read_hf_config(path) if (Path(path) / "config.json").is_file() else {}
    if any(config.get(key) for family in FAMILIES.values() for key in family.draft_keys):
        return True
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or family.draft_keys or family.draft_body is None:
        return False
    index = Path(path) / "model.safetensors.index.json"
    content = read_json(index) if index.is_file() else {}
    named = content.get("weight_map") if isinstance(content, dict) else None
    names = list(named) if isinstance(named, dict) else []
    return (Path(path) / CONVERTED_DRAFTS).is_dir() or any(name.startswith(family.draft_body) for name in names)


def body_of(architecture: str) -> str:
    """Returns the architecture's name without the suffix of its head."""
    for suffix in (*GENERATES_SUFFIXES, VALUE_HEAD_SUFFIX, STEP_HEAD_SUFFIX):
        architecture = architecture.removesuffix(suffix)
    return architecture


def _score_heads(config: dict[str, Any]) -> int:
    """Outputs of the score head; 1 for a classifier, whose head does not fit.

    Without label names transformers assumes two.
    """
    labels = config.get("id2label")
    if config.get("problem_type") != SCORES:
        return 1
    return max(1, len(labels)) if isinstance(labels, dict) else 2


def architecture_of(config: dict[str, Any], where: str = "config.json") -> str:
    """Returns the first name under `architectures`. Raises UnsupportedModel if that is no list of names."""
    names = config.get("architectures") or ["(none)"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedModel(f"{where}: architectures must be a list of names, not {str(names)[:60]!r}")
    return str(names[0])


def _family(config: dict[str, Any], where: str) -> Decoder | None:
    name = architecture_of(config, where)
    for suffix in (VALUE_HEAD_SUFFIX, STEP_HEAD_SUFFIX):
        bodies = {(family.scorer or body_of(family.architecture)) + suffix: family for family in FAMILIES.values()}
        if name in bodies:
            return bodies[name]
    return next((family for family in FAMILIES.values() if family.architecture == name), None)
