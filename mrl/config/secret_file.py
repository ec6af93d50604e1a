"""Reads secrets from files that the configuration names, so that no secret is part of a configuration."""

from __future__ import annotations

import os
import stat

MAX_BYTES = 4096


def read_secret(path: str) -> str:
    """Returns the single line of the file.

    Raises ValueError, with a one-line message, if the file is missing, not one line, or accessible to other users.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # opening a pipe would block forever
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise ValueError(f"{path} is not a file")
            if state.st_mode & 0o077:
                raise ValueError(f"{path} can be read or written by other users: run chmod 600 on it")
            text = file.read(MAX_BYTES + 1).decode("ascii").strip()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ValueError(f"{path} does not contain a key: expected one line of letters, digits and signs") from None
    if not text:
        raise ValueError(f"{path} is empty: expected one line with the key")
    if len(text) > MAX_BYTES or not text.isprintable() or " " in text:
        raise ValueError(f"{path} does not contain a key: expected one line of letters, digits and signs")
    return text
