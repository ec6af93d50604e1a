"""Origin of a model as its directory tells it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mrl.cards.portable import hub_name
from mrl.families import has_draft_layers

_FRONT = re.compile(r"\A---\r?\n(.*?)\r?\n---\s*$", re.S | re.M)
GENERATES, CLASSIFIES, CLASSIFIES_TOKENS = "text-generation", "text-classification", "token-classification"
SEES = "image-text-to-text"
LICENSE_KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class BaseModel:
    """Base model. name: on the hub for a hub snapshot, else the directory's name; license: as in the base's card, empty
    without one."""

    name: str
    revision: str | None
    license: dict[str, str]


def base_model(path: str | Path) -> BaseModel:
    """Describes the directory that a run started from; unreadable files count as absent."""
    path = Path(path)
    name, revision = hub_name(str(path)) or (path.resolve().name, None)
    front = front_matter(path / "README.md")
    terms = {key: front[key] for key in LICENSE_KEYS if isinstance(front.get(key), str)}
    return BaseModel(name, revision, terms)


def front_matter(card: Path) -> dict[str, Any]:
    """Returns the YAML front matter of a model card; empty without any."""
    try:
        block = _FRONT.search(card.read_text(encoding="utf-8"))
        front = yaml.safe_load(block[1]) if block else None
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return front if isinstance(front, dict) else {}


def tokenizer_facts(model: Path) -> dict[str, str]:
    """Returns the chat template's digest (16 hex digits of its SHA-256) and the end and pad tokens of a model
    directory, each if it is known."""
    config = _json(model / "tokenizer_config.json")
    template = config.get("chat_template")
    if (alone := model / "chat_template.jinja").is_file():
        template = alone.read_text(encoding="utf-8")
    found = {}
    if isinstance(template, str):
        found["chat template"] = f"sha256 {hashlib.sha256(template.encode()).hexdigest()[:16]}"
    for label, key in (("end of sequence", "eos_token"), ("padding", "pad_token")):
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[label] = f"`{token}`"
    return found


@dataclass(frozen=True)
class ExportKind:
    """Kind of an exported model.

    architecture: the first of config.json, empty for adapters or without one; is_vision_reward_model: a scoring model
    with image input, for which transformers has no class; has_drafts: it has multi-token prediction layers
    """

    task: str  # task name of the hub
    is_adapter: bool = False
    architecture: str = ""
    is_vision_reward_model: bool = False
    has_drafts: bool = False


def export_kind(export: Path) -> ExportKind:
    """Returns the kind of a Hugging Face directory, or of a PEFT adapter directory."""
    if adapter := _json(export / "adapter_config.json"):
        task = {"SEQ_CLS": CLASSIFIES, "TOKEN_CLS": CLASSIFIES_TOKENS}.get(str(adapter.get("task_type")), GENERATES)
        return ExportKind(task, is_adapter=True)
    config = _json(export / "config.json")
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    ends = {
        "ForSequenceClassification": CLASSIFIES,
        "ForTokenClassification": CLASSIFIES_TOKENS,
        "ForConditionalGeneration": SEES,
    }
    task = next((task for end, task in ends.items() if name.endswith(end)), GENERATES)
    judges = task in (CLASSIFIES, CLASSIFIES_TOKENS) and "vision_config" in config
    return ExportKind(task, architecture=name, is_vision_reward_model=judges, has_drafts=has_draft_layers(export))


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
