"""Rows that a library makes, by a name in place of a path: of reasoning-gym, and of environments of verifiers."""

from __future__ import annotations

from typing import Any

from mrl.config import reasoning_tasks, verifiers_environments


def is_name(path: str) -> bool:
    """Returns True if a data source is not a path, but names rows of a library."""
    return reasoning_tasks.is_task(path) or verifiers_environments.is_environment(path)


def named_rows(name: str, split: str | None) -> list[dict[str, Any]]:
    """Returns the rows of a name. Raises ValueError, which says what is wrong with it."""
    if reasoning_tasks.is_task(name):
        return reasoning_tasks.rows(name)
    return verifiers_environments.rows(name, split)
