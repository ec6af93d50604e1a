"""Checks a tokenizer's files without loading the tokenizer: before a process starts and any of its code runs.

Uses the standard library only, as the other configuration checks do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.foreign import read_json

TOKENIZER, SETTINGS, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TOKENIZER_FILES = (TOKENIZER, SETTINGS, SPECIAL, "chat_template.jinja")


def tokenizer_problems(
    path: str | Path, vocab_size: int | None, eos_token: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yields (key, problem) for the tokenizer of a model directory; nothing for missing files.

    Args:
        vocab_size: vocabulary of the model, if known
        eos_token: model.eos_token
    """
    try:
        content, settings = _files(path)
    except (OSError, ValueError) as error:
        yield "model.path", str(error)
        return
    try:
        ids = _tokens(content) | _added(settings) if content else {}
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        yield "model.path", f"{path}: {TOKENIZER} or {SETTINGS} is not a valid tokenizer file ({error!r})"
        return
    if settings.get("auto_map"):
        what = "auto_map names custom code, which mrl never runs"
        remedy = "save the tokenizer as a tokenizer.json of a transformers class, and remove auto_map"
        yield "model.path", f"{Path(path) / SETTINGS}: {what}: {remedy}"
    if not ids:
        return
    tokens, own = max(ids.values()) + 1, _text(settings.get("eos_token"))
    if vocab_size is not None and tokens > vocab_size:
        yield "model.path", too_large(Path(path) / TOKENIZER, tokens, vocab_size)
    if eos_token is not None and eos_token not in ids:
        yield "model.eos_token", f"{path}: model.eos_token {eos_token!r} is not in the vocabulary"
    if eos_token is None and own is not None and (not isinstance(own, str) or own not in ids):
        yield "model.path", f"{Path(path) / SETTINGS}: eos_token {str(own)[:80]!r} is not in the vocabulary"


def special_tokens(path: str | Path) -> dict[str, tuple[str, int]]:
    """Returns role -> (token, id) for those of "eos", "pad", "unk" and "bos" that the tokenizer's files name.

    Raises OSError or ValueError for files that cannot be read.
    """
    content, settings = _files(path)
    ids, found = _tokens(content) | _added(settings) if content else _added(settings), {}
    for role in ("eos", "pad", "unk", "bos"):
        token = _text(settings.get(f"{role}_token"))
        if isinstance(token, str) and token in ids:
            found[role] = token, ids[token]
    return found


def difference(path: str | Path, actor: str | Path) -> str | None:
    """Returns how the tokens of a model directory differ from the actor's; None if they are equal."""
    found = []
    for each in (path, actor):
        try:
            content, settings = _files(each)
            found.append(_tokens(content) | _added(settings) if content else {})
        except (OSError, AttributeError, TypeError, KeyError, ValueError) as error:
            return f"{each}: cannot read {TOKENIZER} ({error!r}), which must have the same tokens as the actor's"
        if not found[-1]:
            return f"{each} has no {TOKENIZER}: its tokens cannot be compared with the actor's"
    own, theirs = ({(token, number) for token, number in tokens.items()} for tokens in found)
    if own == theirs:
        return None
    number = min(number for _, number in own ^ theirs)
    mine, others = (sorted(token for token, place in tokens if place == number) for tokens in (own, theirs))
    return (
        f"{path} has another tokenizer than the actor: token {number} is {mine}, and the actor's is {others}. A "
        "teacher reads the actor's tokens: use one of the same model family"
    )


def too_large(path: str | Path, tokens: int, vocab_size: int) -> str:
    return (
        f"{path}: the tokenizer has {tokens} tokens, and the model's vocabulary (vocab_size in config.json) "
        f"{vocab_size}: ids beyond it have no embedding"
    )


def _files(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the contents of tokenizer.json, and the settings of the other two files."""
    return _read(Path(path) / TOKENIZER), _read(Path(path) / SPECIAL) | _read(Path(path) / SETTINGS)


def _text(token: Any) -> Any:
    """Returns the text of a special token, which is written as such or in a section."""
    return token.get("content") if isinstance(token, dict) else token


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} must contain a JSON object, not {type(content).__name__}")
    return content


def _tokens(content: dict[str, Any]) -> dict[str, int]:
    """Returns token -> id of a tokenizer.json: vocabulary (a mapping, or a list with scores) and added tokens."""
    vocabulary = content["model"].get("vocab", {})
    if isinstance(vocabulary, list):
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    found = {str(token): int(number) for token, number in vocabulary.items()}
    return found | {str(added["content"]): int(added["id"]) for added in content.get("added_tokens") or []}


def _added(settings: dict[str, Any]) -> dict[str, int]:
    decoder = settings.get("added_tokens_decoder") or {}
    return {str(added["content"]): int(number) for number, added in decoder.items()}
