"""Writer turns: shared storage may be slower with many concurrent writers than with one."""

from __future__ import annotations

import socket
from typing import Literal

from mrl.parallel import gather, rank

Writers = Literal["every_rank", "one_node", "one_rank"]


def turns_of_ranks(writers: Writers) -> list[int]:
    """Returns the turn of every rank, from 0. Collective."""
    keys = {"every_rank": "", "one_node": socket.gethostname(), "one_rank": str(rank())}
    return in_order(gather(keys[writers]))


def in_order(keys: list[str]) -> list[int]:
    """Returns one turn per distinct key, in order of the keys' first appearance."""
    numbers = {key: turn for turn, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]
