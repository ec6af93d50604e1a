"""Compares the configuration of a resumed run with that of its checkpoint, and decides which changes are allowed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mrl.config.file_fingerprint import changed_files, digests, files_below, fingerprint
from mrl.config.json_rows import is_name, named_rows
from mrl.config.keys import keys_of, walk
from mrl.config.trainers.base import AnyConfig
from mrl.options.base import Section
from mrl.redaction import redact_tree

# These keys affect the place, length, speed and output of a run, but not what it computes. The longest entry of
# MAY_CHANGE or MUST_NOT_CHANGE that covers a key decides; a key that no entry covers must not change.
MAY_CHANGE = (
    "run",
    "resilience",
    "checkpoint",
    "sync",
    "validation",
    "rollout",
    "placement",
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
    "actor.routing_compare_steps",
    "actor.micro_batch",
    "actor.sharded",
    "sampler.batch",
    "images",
    *(f"{model}.parallel" for model in ("actor", "critic", "ref", "teacher")),
    *(f"teacher.{key}" for key in ("url", "api_key_file", "concurrent_requests", "timeout_s")),
    *(f"{model}.max_tokens_per_microbatch" for model in ("actor", "critic", "ref")),
    *(f"{model}.recompute" for model in ("actor", "critic")),
    *(f"{model}.layers" for model in ("actor", "critic")),
    *(f"{model}.offload" for model in ("actor", "critic", "ref", "reward.model", "teacher")),
)
BEHIND = (*(f"rollout.{key}" for key in ("max_staleness", "interrupt", "order", "segment_tokens", "oversample")),)
SAMPLES = ("rollout.engine", "rollout.sampling", "rollout.deterministic", "rollout.quantization")
MUST_NOT_CHANGE = ("run.seed", *SAMPLES, *BEHIND)
QUIET = ("run.name", "run.root", "checkpoint.accept_changes")  # changes that are not reported

NAMED = 3  # edited files that a message names

Tree = dict[str, Any]


class ConfigChanged(Exception):
    """The configuration differs from the checkpoint's in a key that changes what the run computes."""


@dataclass(frozen=True)
class KeyChange:
    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.old)} -> {_short(self.new)}"


def snapshot(cfg: AnyConfig) -> Tree:
    """Returns the part of the configuration that a checkpoint stores, for JSON and without passwords.

    Reads the training data, at about a second per GB, and samples of model files.
    """
    found = {
        key: {source.path: contents(Path(source.path), source.split) for source in sources}
        for key, sources in cfg.sources().items()
    }
    held_out = {
        f"{key}.validation": {
            source.path: contents(Path(source.path), source.split) for source in use.cfg.validation or ()
        }
        for key, use in cfg.data_uses().items()
    }
    outlines: Tree = {}
    for key, path in cfg.reread_files():
        outlines.setdefault(key, {})[path] = fingerprint(Path(path))
    read = {"data_contents": found, "held_out_contents": held_out, "read_anew": outlines}
    return {"config": redact_tree(cfg.model_dump(mode="json")), **read}


def contents(path: Path, split: str | None = None) -> Tree:
    """Returns size and digest of a file, of all files of a directory except hidden and cache files, or of the rows of a
    name, of which `split` chooses some.
    """
    if is_name(str(path)):
        made = json.dumps(named_rows(str(path), split)).encode()
        return {"bytes": len(made), "digest": hashlib.blake2b(made, digest_size=16).hexdigest()}
    files = files_below(path) if path.is_dir() else [path]
    found = digests(files, whole=True)
    size, digest = sum(file.stat().st_size for file in files), found[0] if found else ""
    if path.is_dir():
        of_each = "\n".join(f"{file.relative_to(path)} {digest}" for file, digest in zip(files, found, strict=True))
        digest = hashlib.blake2b(of_each.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    return {"bytes": size, "digest": digest}


def check_resume(stored: Tree, cfg: AnyConfig, checkpoint: Path) -> list[KeyChange]:
    """Returns the changes that are harmless or accepted, to be shown.

    Args:
        stored: `snapshot` of the run that wrote `checkpoint`

    Raises:
        ConfigChanged: lists every other change with old and new value, and says what to do
    """
    changes = [change for change in compare(stored, cfg) if not _covers(QUIET, change.key)]
    accepted = (*cfg.checkpoint.accept_changes,)
    refused = [c for c in changes if not may_change(c.key) and not _covers(accepted, c.key)]
    if refused:
        lines = "\n".join(f"  {change}" for change in refused)
        keys = ", ".join(dict.fromkeys(change.key for change in refused))
        raise ConfigChanged(
            f"{checkpoint} was written with another configuration, and resuming would not continue the same run:\n"
            f"{lines}\nUndo the change, choose another run.name for a new run, or resume anyway with "
            f"'checkpoint.accept_changes=[{keys}]'"
        )
    return changes


def compare(stored: Tree, cfg: AnyConfig) -> list[KeyChange]:
    """Returns every key that differs, passwords excepted.

    A key that did not exist when the checkpoint was written counts as its default.
    """
    present = snapshot(cfg)
    changes = list(_differences(redact_tree(stored["config"]), cfg, present["config"], ""))
    for key, sources in (present["data_contents"] | present["held_out_contents"]).items():
        if not any(_covers((change.key,), key) for change in changes):
            changes += _edited(key, sources, stored)
    for key, paths in present["read_anew"].items():
        if not any(_covers((change.key,), key) for change in changes):
            changes += _rewritten(key, paths, stored.get("read_anew", {}).get(key, {}))
    return changes


def unknown(stored: Tree, cfg: AnyConfig) -> list[str]:
    """Returns one sentence for each change that cannot be detected, because an older checkpoint lacks the digests."""
    keys = ", ".join(dict.fromkeys(key for key, _ in cfg.reread_files()))
    of_files = f"the checkpoint has no digests of files: changes to the contents of {keys} cannot be detected"
    of_data = [
        f"the checkpoint has no digests of data: changes to {key} that keep its size cannot be detected"
        for key in cfg.sources()
        if key in stored.get("data_bytes", {})
    ]
    return of_data + ([of_files] if keys and "read_anew" not in stored else [])


def _edited(key: str, sources: Tree, stored: Tree) -> Iterator[KeyChange]:
    """Yields data sources whose contents differ from those that the checkpoint's run has read."""
    before = (stored.get("data_contents", {}) | stored.get("held_out_contents", {})).get(key, {})
    for path, now in sources.items():
        if path in before and before[path] != now:
            yield KeyChange(key, f"{path} of {_size(before[path])}", f"edited: {_size(now)}")
    if key in (sizes := stored.get("data_bytes", {})):  # older checkpoints store sizes only
        size = sum(source["bytes"] for source in sources.values())
        if size != sizes[key]:
            yield KeyChange(key, f"{sizes[key]} bytes of data", f"{size} bytes")


def _rewritten(key: str, paths: Tree, before: Tree) -> Iterator[KeyChange]:
    """Yields files and models whose contents differ from those that the checkpoint's run has used."""
    for path, now in paths.items():
        if path in before and (names := changed_files(before[path], now)):
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            yield KeyChange(key, path, f"edited: {', '.join(names[:NAMED])}{more}")


def _size(source: Tree) -> str:
    return f"{source['bytes']} bytes, digest {source['digest'][:8]}"


def may_change(key: str) -> bool:
    """True if a resumed run may change the key: the longest entry that covers the key decides. A section of an adapter
    may change as the run's section of that name.
    """
    key = re.sub(r"^adapters\.[^.]+\.", "", key)
    allowed, forbidden = _covers(MAY_CHANGE, key), _covers(MUST_NOT_CHANGE, key)
    return len(allowed) > len(forbidden)


def is_key(section: type[BaseModel], key: str) -> bool:
    """True if the dotted key names a value or a section of this configuration class."""
    return any(each.is_called(key) for each in walk(keys_of(section)))


def _differences(old: Tree, section: Section, new: Tree, prefix: str) -> Iterator[KeyChange]:
    old = section.present_names(old)
    for name, field in type(section).model_fields.items():
        inner, before = dict(section)[name], old.get(name)
        if name not in old:
            default = None if field.is_required() else field.get_default()
            before = json.loads(json.dumps(default, default=lambda section: section.model_dump(mode="json")))
        if isinstance(inner, Section) and isinstance(before, dict):
            yield from _differences(before, inner, new[name], f"{prefix}{name}.")
        elif isinstance(before, dict) and _holds(inner, Section) and _holds(before, dict):
            if inner.keys() != before.keys():
                yield KeyChange(f"{prefix}{name}", [*before], [*inner])
            for each in filter(before.__contains__, inner):
                yield from _differences(before[each], inner[each], new[name][each], f"{prefix}{name}.{each}.")
        elif before != new[name]:
            yield KeyChange(f"{prefix}{name}", before, new[name])


def _covers(entries: tuple[str, ...], key: str) -> str:
    """Returns the longest entry that is the key or a section around it; empty if there is none."""
    return max((entry for entry in entries if f"{key}.".startswith(f"{entry}.")), key=len, default="")


def _holds(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(inner, kind) for inner in value.values())


def _short(value: Any) -> str:
    """Formats a value as in YAML; a nested section only as "a section"."""
    holds_sections = isinstance(value, dict) and any(isinstance(inner, dict | list) for inner in value.values())
    return "a section" if holds_sections else json.dumps(value)
