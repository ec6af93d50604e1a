"""Values of a config.json, each checked for kind and range as it is read."""

from __future__ import annotations

from typing import Any


class UnsupportedModel(ValueError):
    """The config describes a model that mrl would compute wrongly; the message names the key."""


class Keys:
    """Checked access to config.json.

    Raises UnsupportedModel, naming file and key, for a bad value. A null is a missing key.
    """

    def __init__(self, content: dict[str, Any], where: str) -> None:
        self.content, self.where = content, where

    def __getitem__(self, key: str) -> Any:
        return self.content.get(key)

    def size(self, key: str, largest: int, default: int | None = None) -> int:
        """Returns a whole number from 1 to `largest`. Without a default the key must exist."""
        value = self._value(key, default)
        if type(value) is not int or not 1 <= value <= largest:
            raise self.wrong(key, f"an integer from 1 to {largest}")
        return value

    def number(self, key: str, default: float | None, low: float, high: float) -> float:
        """Returns a finite number from `low` to `high`."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.wrong(key, f"a number from {low:.4g} to {high:.4g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def table(self, key: str) -> Keys | None:
        """Returns an object with keys of its own; None if it is missing."""
        value = self[key]
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Keys(value, f"{self.where}: {key}")

    def token_ids(self, key: str, vocabulary: int) -> tuple[int, ...]:
        """Returns one id or a list of ids, each below `vocabulary`; none if the key is missing."""
        value = self[key]
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
            raise self.wrong(key, f"token ids from 0 to {vocabulary - 1}")
        return tuple(ids)

    def wrong(self, key: str, wanted: str) -> UnsupportedModel:
        if self[key] is None:
            return UnsupportedModel(f"{self.where} lacks {key!r}: expected {wanted}")
        return UnsupportedModel(f"{self.where}: {key} must be {wanted}, not {short(self[key])}")

    def _value(self, key: str, default: Any) -> Any:
        return default if self[key] is None else self[key]


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
