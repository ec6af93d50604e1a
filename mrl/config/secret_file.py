"""Secrets that a configuration names by their file: the secret itself stands in no configuration."""

from __future__ import annotations

import os
import stat

MAX_BYTES = 4096


def read_secret(path: str) -> str:
    """The file's one line. Raises ValueError with one line if it is not there, or not for its owner's eyes alone."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe would be waited for without end
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
