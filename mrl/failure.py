"""How a rank's error reaches the user: once, through the launcher. The traceback goes to the rank's log.

Ranks fail together: one has the cause, the others lose contact with it. Each writes down its first error at the moment
it appears, and the launcher shows the one that is the cause.
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

FILE_VARIABLE = "MRL_FAILURE_FILE"  # set by the launcher, for each rank its own
# In the words of gloo, NCCL and torch's store. What they say of a mistake of this rank's own, or of its machine, such
# as two ranks on one GPU or a full /dev/shm, is a cause.
_LOST_CONTACT = re.compile(
    r"connection (was likely )?(closed|reset|refused|abort)|broken pipe|monitoredbarrier|remote process exited"
    r"|ncclremoteerror|^(?=.*(gloo|nccl|tcpstore|default_pg|socket|pair closure))"
    r"(?=.*(closed|closure|timed out|time-?out|timing out|aborted|failed to recv|mesh failed))",
    re.I | re.S,
)


class LostContact(RuntimeError):
    """A process that this rank needs does not answer: a consequence, as torch's own errors of a lost peer."""


@dataclass(frozen=True)
class Failure:
    """`lost_contact`: a consequence of another rank's end, as far as one can tell from the error."""

    unix_time: float
    message: str
    traceback: str
    lost_contact: bool


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Put it innermost around what may fail, so that the time is that of the error and not of the end of the closing
    down that follows it."""
    try:
        yield
    except Exception as error:
        note(error)
        raise


def note(error: Exception) -> bool:
    """Writes the error down for the launcher, unless an earlier one is there; False if no launcher asked for that."""
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
    """A file beside it that holds the room which `note` needs: the disk may be full by then."""
    return file.with_name(f"{file.name}.reserve")


def read(file: Path) -> Failure | None:
    return Failure(**json.loads(file.read_text())) if file.exists() else None


def describe(error: BaseException) -> str:
    """An error of this program says it all; of any other one the type and our own line that met it."""
    if _is_ours(error):
        return str(error)
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(Path(__file__).parent)]
    return f"{text} (at {ours[-1].filename}:{ours[-1].lineno}, in {ours[-1].name})" if ours else text


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.startswith("mrl.")


def is_lost_contact(error: BaseException) -> bool:
    """Torch raises RuntimeErrors when a peer is gone, and says in words what happened."""
    while error.__cause__ is not None and not isinstance(error, LostContact):
        error = error.__cause__
    is_foreign = isinstance(error, RuntimeError) and not _is_ours(error)
    return isinstance(error, LostContact) or (is_foreign and bool(_LOST_CONTACT.search(str(error))))
