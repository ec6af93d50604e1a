"""What a run that goes on from a checkpoint may do otherwise than the run that made it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from mrl.config.data_checks import data_sections
from mrl.config.schema import Config

# Where, how long and how fast; what is written down and when. The longest entry that covers a key decides, and a key
# that none covers is part of what the run computes.
MAY_CHANGE = (
    "run",
    "resilience",
    "checkpoint",
    "sync",
    "validation",
    "rollout",
    "reward.workers",
    "reward.timeout_s",
    "reward.on_error",
    "reward.servers",
    "reward.model.parallel",
    "reward.model.max_tokens_per_microbatch",
    "data.validation",
    "model.allow_pickle",
    "ema.offload",
    "ema.in_validation",
    *(f"{model}.parallel" for model in ("actor", "critic", "ref")),
    *(f"{model}.max_tokens_per_microbatch" for model in ("actor", "critic", "ref")),
    *(f"{model}.recompute" for model in ("actor", "critic")),
)
MUST_NOT_CHANGE = ("run.seed", "rollout.engine", "rollout.sampling", "rollout.deterministic")
QUIET = ("run.name", "run.root", "checkpoint.accept_changes")  # changes that need no word

Tree = dict[str, Any]


class ConfigChanged(Exception):
    """The configuration differs from the checkpoint's in what makes the run what it is."""


@dataclass(frozen=True)
class Change:
    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.old)} -> {_short(self.new)}"


def snapshot(cfg: Config) -> Tree:
    """What a checkpoint keeps of the configuration, for JSON. Reads the sizes of the training data."""
    sizes = {
        f"{key}.train": sum(_bytes(Path(source.path)) for source in data.train)
        for key, data in data_sections(cfg).items()
    }
    return {"config": cfg.model_dump(mode="json"), "data_bytes": sizes}


def _bytes(path: Path) -> int:
    files = (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def check_resume(stored: Tree, cfg: Config, checkpoint: Path) -> list[Change]:
    """The changes that are harmless or accepted, to be shown. `stored`: `snapshot` of the run that made `checkpoint`.

    Raises ConfigChanged, which lists every other one with old and new value, and says what to do.
    """
    changes = [change for change in compare(stored, cfg) if not _covers(QUIET, change.key)]
    accepted = (*cfg.checkpoint.accept_changes,)
    refused = [c for c in changes if not may_change(c.key) and not _covers(accepted, c.key)]
    if refused:
        lines = "\n".join(f"  {change}" for change in refused)
        keys = ", ".join(dict.fromkeys(change.key for change in refused))
        raise ConfigChanged(
            f"{checkpoint} was made with another configuration, and going on from it would not be the same run:\n"
            f"{lines}\nchange it back, or choose another run.name to start anew, or go on all the same with "
            f"'checkpoint.accept_changes=[{keys}]'"
        )
    return changes


def compare(stored: Tree, cfg: Config) -> list[Change]:
    """Every key that differs. A key that the stored configuration does not know yet had its default."""
    changes = list(_differences(stored["config"], cfg, cfg.model_dump(mode="json"), ""))
    for key, now in snapshot(cfg)["data_bytes"].items():
        before = stored["data_bytes"].get(key, now)
        if before != now and not any(change.key == key for change in changes):
            changes.append(Change(key, f"{before} bytes of data", f"{now} bytes"))
    return changes


def may_change(key: str) -> bool:
    allowed, forbidden = _covers(MAY_CHANGE, key), _covers(MUST_NOT_CHANGE, key)
    return len(allowed) > len(forbidden)


def is_key(section: type[BaseModel], key: str) -> bool:
    """Whether the dotted key names a value or a section of this kind of configuration."""
    name, _, rest = key.partition(".")
    if name not in section.model_fields:
        return False
    annotation = section.model_fields[name].annotation
    options = (annotation, *get_args(annotation))
    below = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
    return not rest or any(is_key(option, rest) for option in below)


def _differences(old: Tree, section: BaseModel, new: Tree, prefix: str) -> Iterator[Change]:
    for name, field in type(section).model_fields.items():
        inner, before = dict(section)[name], old.get(name)
        if name not in old:
            before = None if field.is_required() else json.loads(json.dumps(field.get_default(), default=_plain))
        if isinstance(inner, BaseModel) and isinstance(before, dict):
            yield from _differences(before, inner, new[name], f"{prefix}{name}.")
        elif before != new[name]:
            yield Change(f"{prefix}{name}", before, new[name])


def _plain(section: BaseModel) -> Tree:
    return section.model_dump(mode="json")


def _covers(entries: tuple[str, ...], key: str) -> str:
    """The longest entry that is the key or a section that holds it; empty if there is none."""
    return max((entry for entry in entries if f"{key}.".startswith(f"{entry}.")), key=len, default="")


def _short(value: Any) -> str:
    """As YAML has it; a section by its name only."""
    return "a section" if isinstance(value, dict) else json.dumps(value)
