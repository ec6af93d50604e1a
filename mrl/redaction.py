"""Removes passwords from configurations that are written or shown."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
_USER = re.compile(r"(\b[a-zA-Z][\w+.-]*://)[^/?#\s'\"]+@")  # user and password in an address
_FIELD = re.compile(r"([?&](?:[\w-]*(?:token|password|secret|signature)|(?:api[_-]?)?key|auth)=)[^&#\s'\"]+", re.I)
_NAMES = ("password", "token", "secret", "api_key")


def redact(text: str) -> str:
    """Returns `text` with *** for user and password of addresses (http://user:password@host).

    Values of token, key, password, secret, signature and auth in their query are hidden too.
    """
    return _FIELD.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", text))


def redact_tree(value: Any, name: str = "") -> Any:
    """Redacts every text in lists and mappings; values of keys named password, token, secret or api_key are hidden
    entirely."""
    if isinstance(value, dict):
        return {redact(key) if isinstance(key, str) else key: redact_tree(v, str(key)) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_tree(item, name) for item in value]
    if isinstance(value, str):
        return HIDDEN if value and name in _NAMES else redact(value)
    return value
