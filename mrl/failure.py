"""Reports a rank's error to the user once, through the launcher; the traceback goes to the rank's log.

Ranks fail together: one has the cause, the others lose contact with it. Each writes its first error at once, and the
launcher shows the one that is the cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mrl.files import write_atomically
from mrl.redaction import redact

FILE_VARIABLE = "MRL_FAILURE_FILE"  # set by the launcher, one file per rank
# Messages of gloo, NCCL and torch's store. A message about this rank's own mistake, or about its machine, such
# as two ranks on one GPU or a full /dev/shm, is a cause.
_LOST_CONTACT = re.compile(
    r"connection (was likely )?(closed|reset|refused|abort)|broken pipe|monitoredbarrier|remote process exited"
    r"|ncclremoteerror|^(?=.*(gloo|nccl|tcpstore|default_pg|socket|pair closure))"
    r"(?=.*(closed|closure|timed out|time-?out|timing out|aborted|failed to recv|mesh failed))",
    re.I | re.S,
)


class LostContact(RuntimeError):
    """A process that this rank needs does not answer; a consequence, like torch's errors about a lost peer."""


@dataclass(frozen=True)
class Failure:
    """Error of a rank. `lost_contact`: a consequence of another rank's end, as far as the error tells."""

    unix_time: float
    message: str
    traceback: str
    lost_contact: bool


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Notes an error of the block. Use it innermost, so that the time is that of the error and not of the later
    cleanup."""
    try:
        yield
    except Exception as error:
        note(error)
        raise


def note(error: Exception) -> bool:
    """Writes the error for the launcher, unless there is an earlier one. Returns False if no launcher wants it."""
    name = os.environ.get(FILE_VARIABLE)
    if name is None:
        return False
    file = Path(name)
    if not file.exists():
        text = redact("".join(traceback.format_exception(error)))
        failure = Failure(time.time(), redact(describe(error)), text, is_lost_contact(error))
        try:
            reserve(file).unlink(missing_ok=True)
            write_atomically(file, json.dumps(asdict(failure)))
        except OSError as problem:  # the directory is gone
            print(f"{failure.message} (and {file}: {problem.strerror})", file=sys.stderr, flush=True)
    return True


def reserve(file: Path) -> Path:
    """Returns the neighbour file that reserves disk space for `note`, since the disk may be full by then."""
    return file.with_name(f"{file.name}.reserve")


def read(file: Path) -> Failure | None:
    return Failure(**json.loads(file.read_text())) if file.exists() else None


def describe(error: BaseException) -> str:
    """Returns the message of an mrl error; for other errors also the type and mrl's line that met it."""
    if _is_ours(error):
        return str(error)
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(Path(__file__).parent)]
    return f"{text} (at {ours[-1].filename}:{ours[-1].lineno}, in {ours[-1].name})" if ours else text


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.startswith("mrl.")


def is_lost_contact(error: BaseException) -> bool:
    """True for errors about a lost peer; torch raises RuntimeErrors whose text says so."""
    while error.__cause__ is not None and not isinstance(error, LostContact):
        error = error.__cause__
    is_foreign = isinstance(error, RuntimeError) and not _is_ours(error)
    return isinstance(error, LostContact) or (is_foreign and bool(_LOST_CONTACT.search(str(error))))
