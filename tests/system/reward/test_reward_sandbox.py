"""Untrusted programs in the sandbox: attempts to escape, attempts to exhaust resources, and remaining processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mrl.reward.sandbox import Limits, ProgramResult, SandboxError, groups, isolate, run_python
from mrl.reward.sandbox.run import check_isolation

LIMITS = Limits(wall_s=30.0, memory_mib=256, disk_mib=4, output_kib=16)


def isolated() -> bool:
    try:
        check_isolation("bubblewrap")
    except SandboxError:
        return False
    return True


needs_bubblewrap = pytest.mark.skipif(not isolated(), reason="no bubblewrap, or no namespaces")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not left, [child.cmdline() for child in left]


def run(program: str, stdin: str = "", limits: Limits = LIMITS) -> ProgramResult:
    return run_python(program, stdin, limits=limits)


@needs_bubblewrap
def test_an_honest_program_runs() -> None:
    ended = run("import json, sys; print(json.dumps(sorted(map(int, sys.stdin.read().split()))))", "3 1 2\n")
    assert ended == ProgramResult("exit code 0", "[1, 2, 3]\n", "")
    ended = run("import sys; print('so far'); print('why', file=sys.stderr); sys.exit(3)")
    assert ended == ProgramResult("exit code 3", "so far\n", "why\n")


@needs_bubblewrap
def test_it_may_write_in_its_own_folder_and_finds_it_empty() -> None:
    program = "import os, tempfile; print(os.listdir('.')); tempfile.mkstemp(); open('x', 'w').write('y')"
    assert [run(program).stdout for _ in range(2)] == ["[]\n", "[]\n"]


# Each program prints "out" if it succeeds.
ESCAPES = {
    "read the trainer's files": "print('out', open({secret!r}).read())",
    "read /etc/passwd": "print('out', open('/etc/passwd').read())",
    "read /proc of others": "import os; print('out' if os.path.exists('/proc/1/environ') else os.listdir('/'))",
    "read the environment": "import os; print('out' if 'MRL_SECRET' in os.environ else sorted(os.environ))",
    "write beside the data": "open({folder!r} + '/new', 'w').write('x'); print('out')",
    "write into Python": "import os, sys; open(os.__file__, 'a').write('#'); print('out')",
    "write into /usr": "open('/usr/bin/new', 'w'); print('out')",
    "write into /": "open('/new', 'w'); print('out')",
    "fill /dev/shm": "open('/dev/shm/new', 'wb').write(b'x'); print('out')",
    "open a disk": "import os; os.mknod('disk', 0o60600, os.makedev(8, 0)); open('disk').read(1); print('out')",
    "connect to this machine": "import socket; socket.create_connection(('127.0.0.1', {port})); print('out')",
    "connect to the internet": "import socket; socket.create_connection(('1.1.1.1', 53), 2); print('out')",
    "connect to the host of a virtual machine": "import socket; socket.socket(socket.AF_VSOCK); print('out')",
    "connect to an abstract socket": "import socket; socket.socket(socket.AF_UNIX).connect({abstract!r}); print('out')",
    "kill the trainer": "import os, signal; os.kill({pid}, signal.SIGTERM); print('out')",
    "kill everything": "import os, signal; os.kill(-1, 0); print('out')",
    "become root": "import os; os.setuid(0); print('out')",
    "be root already": "import os; print('out' if os.getuid() == 0 else os.getuid())",
    "run a program as root": "import subprocess; subprocess.run(['/usr/bin/su', '-c', 'id'], check=True); print('out')",
    "mount": "import ctypes; print('out' if CALL(b'none', b'/tmp', b'proc', 0, None) == 0 else 0)",
    "make a namespace": "import ctypes; print('out' if ctypes.CDLL(None).unshare(0x10000000) == 0 else 0)",
    "change the root": "import os; os.chroot('/tmp'); print('out')",
    "trace a process": "import ctypes; print('out' if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 else 0)",
    "set the host's name": "import socket; socket.sethostname('x'); print('out')",
    "raise its limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); print('out')",
    "memory without address space": "import ctypes; print('out' if ctypes.CDLL(None).shmget(0, 1, 0o1600) >= 0 else 0)",
    "memory as a file": "import os; os.memfd_create('x'); print('out')",
    "keys of the kernel": "import ctypes; print('out' if ctypes.CDLL(None).syscall(250, 0, -3, 0, 0, 0) > 0 else 0)",
    "attributes without a size": "import os; open('x', 'w'); os.setxattr('x', 'user.x', bytes(60_000)); print('out')",
    "pages in a pipe": "import os; print('out' if VMSPLICE(os.pipe()[1], 0, 0, 0) == 0 else 0)",
    "larger buffers": "import socket; socket.socketpair()[0].setsockopt(1, 7, 1 << 30); print('out')",
    "marks in the kernel": "import ctypes; print('out' if ctypes.CDLL(None).inotify_init() >= 0 else 0)",
    "limits of the first process": "import resource; resource.prlimit(1, resource.RLIMIT_NOFILE); print('out')",
    "stdin as a file": "import os, stat; print(0 if stat.S_ISFIFO(os.fstat(0).st_mode) else 'out')",
    "data beside the system": "import os; print([d for d in ('/usr/local', '/usr/src', '/usr/share/doc', '/opt')"
    " if os.path.exists(d)] and 'out')",
    "installed packages": "import sys, os; print([d for d in sys.path if 'packages' in d and os.path.exists(d)"
    " and os.listdir(d)] and 'out')",
    "packages of the system": "import os; print(os.path.exists('/usr/lib/python3') and 'out' or [d for top in ('/usr', "
    "'/python') for d, _, _ in os.walk(top) if d.endswith('-packages') and os.listdir(d)] and 'out')",
    "other folders of /usr/lib": "import os; print([d for d in os.listdir('/usr/lib') if d != 'locale' and "
    "not d.startswith(('ld-', 'python3.')) and '-linux-' not in d] and 'out')",
    "inherited files": "print('out' if any(FD(n) for n in range(3, 64)) else 0)",
}
HELP = """
import os as _os
def VMSPLICE(*arguments):
    import ctypes
    return ctypes.CDLL(None).vmsplice(*arguments)
def FD(n):
    try:
        _os.fstat(n)
        return True
    except OSError:
        return False
def CALL(*arguments):
    import ctypes
    return ctypes.CDLL(None).mount(*arguments)
"""


@contextlib.contextmanager
def outside(folder: Path) -> Iterator[dict[str, object]]:
    """Opens a file, a port and an abstract socket that a program must not reach, and returns their names."""
    secret, abstract = folder / "secret", f"\0mrl_test_{os.getpid()}"
    secret.write_text("the answers")
    folder.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(abstract)
        local.listen()
        port = server.getsockname()[1]
        yield {"secret": str(secret), "folder": str(folder), "port": port, "pid": os.getpid(), "abstract": abstract}


@needs_bubblewrap
@pytest.mark.parametrize("attempt", ESCAPES)
def test_there_is_no_way_out(attempt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRL_SECRET", "1")
    with outside(tmp_path) as names:
        ended = run(HELP + ESCAPES[attempt].format(**names))
    assert "out" not in ended.stdout, ended
    assert ended.ok or ended.stderr, f"it ended without a word: {ended}"
    assert [file.name for file in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    "attempt",
    ["read the trainer's files", "read the environment", "connect to this machine", "connect to an abstract socket"],
)
def test_without_isolation_the_same_attempts_succeed(
    attempt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without isolation the attempts succeed, or the tests above would prove nothing; only the environment is
    hidden."""
    monkeypatch.setenv("MRL_SECRET", "1")
    with outside(tmp_path) as names:
        program = HELP + ESCAPES[attempt].format(**names)
        ended = run_python(program, limits=LIMITS, isolation="none")
    assert ("out" in ended.stdout) == (attempt != "read the environment"), ended


BOMBS = {  # how the program ends, or what it prints
    "endless loop": ("while True: pass", "time out"),
    "sleeps": ("import time; time.sleep(1000)", "time out"),
    "deaf to signals": (
        "import signal\nfor s in {*range(1, 65)} - {9, 19, 32, 33}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "time out",
    ),
    "waits for input": ("input(); input()", "EOFError"),
    "memory": ("x = [bytearray(1 << 20) for _ in range(10_000)]", "MemoryError"),
    "one huge block": ("x = bytearray(1 << 40)", "MemoryError"),
    "mapped memory": ("import mmap; x = mmap.mmap(-1, 1 << 33)", "OSError|MemoryError"),
    "fork bomb": ("import os\nwhile True: os.fork()", "BlockingIOError"),
    "threads": (
        "import threading, time\nfor _ in range(1000): threading.Thread(target=time.sleep, args=(99,)).start()",
        "can't start new thread",
    ),
    "a daemon": ("import os\nif os.fork() == 0:\n os.setsid()\n while True: pass", "BlockingIOError"),
    "one big file": (
        "f = open('x', 'wb', 0)\nwhile True: f.write(bytes(1 << 20))",
        "File too large|No space left|SIGXFSZ",
    ),
    "many files": ("for i in range(10**9): open(str(i), 'wb').write(bytes(1 << 20))", "No space left"),
    "many long names": ("import os\nfor i in range(10**9): os.mknod('x' * 240 + str(i))", "No space left"),
    "deleted files": (
        "import os\nf = []\nwhile True:\n f.append(open('x', 'wb', 0)); f[-1].write(bytes(1 << 19)); os.remove('x')",
        "No space left",
    ),
    "open files": ("x = [open('/dev/null') for _ in range(10_000)]", "Too many open files"),
    "output": ("while True: print('x' * 1000)", "too much output"),
    "error output": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "too much output"),
    "recursion": (
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "RecursionError|SIGSEGV|MemoryError|time out",
    ),
    "crash": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "huge number": ("print(9 ** 9 ** 9)", "time out|MemoryError"),
    "regular expression": ("import re; re.match('(a+)+$', 'a' * 64 + 'b')", "time out"),
    "doubling": ("x = 'x'\nwhile True: x += x", "MemoryError"),
}


@needs_bubblewrap
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_ends_at_its_limits(bomb: str) -> None:
    program, end = BOMBS[bomb]
    wall_s = 1.0 if "time out" in end else 30.0  # a time limit only if nothing else ends the program
    ended = run(program, limits=Limits(wall_s=wall_s, memory_mib=128, disk_mib=4, output_kib=16))
    said = f"{ended.how}\n{ended.stderr}"
    assert not ended.ok and any(text in said for text in end.split("|")), said
    assert len(ended.stdout) + len(ended.stderr) < 300_000, "output beyond its limit is not kept"


@needs_bubblewrap
def test_processes_up_to_the_limit_may_be_had_and_end_with_the_program() -> None:
    program = (
        "import os, sys, time\n"
        "made = 0\n"
        "while True:\n"
        "    try: child = os.fork()\n"
        "    except BlockingIOError: break\n"
        "    if child == 0: time.sleep(1000)\n"
        "    made += 1\n"
        "print(made)\n"
    )
    assert run(program, limits=Limits(processes=4)).stdout == "3\n"


@needs_bubblewrap
def test_two_at_once_do_not_share_a_limit() -> None:
    """Two concurrent programs have separate process limits: as root, each caller's programs run as another user. The
    two callers here are two processes."""
    code = (
        "from mrl.reward.sandbox import *; "
        "print(run_python('import os, time; child = os.fork(); time.sleep(1); print(os.getuid()); child and os.wait()',"
        " limits=Limits(processes=2)).stdout.split())"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert all(len(eval(text)) == 2 for text in said), said


@needs_bubblewrap
def test_each_run_has_a_user_of_its_own() -> None:
    """Each run has its own user id. It cannot be the process id, which another namespace may also use."""
    if os.geteuid() != 0:
        pytest.skip("without root the kernel counts by user namespace")
    assert len({run("import os; print(os.getuid())").stdout for _ in range(3)}) == 3


@pytest.mark.skipif(groups.problem() is not None, reason=f"no control group: {groups.problem()}")
def test_a_control_group_bounds_memory_and_is_gone_afterwards() -> None:
    hold = [sys.executable, "-I", "-c", "x = bytearray(200 << 20); print('out')"]
    with groups.group(20, 1) as joined:
        ended = subprocess.run([*joined, *hold], capture_output=True, text=True)
        made = [folder for folder in joined if groups.PREFIX in folder]
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "")
    assert made and not any(map(os.path.exists, made))


@needs_bubblewrap
@pytest.mark.skipif(groups.problem() is not None, reason=f"no control group: {groups.problem()}")
def test_a_program_is_in_a_control_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program runs in its own control group, as a limit below the program's own shows."""
    monkeypatch.setattr(groups, "OF_SANDBOX_MIB", -200)
    hold = "x = bytearray(200 << 20); print('out')"
    assert run(hold).how == "signal SIGKILL"


@pytest.mark.skipif(groups.problem() is not None, reason=f"no control group: {groups.problem()}")
def test_groups_that_killed_trainers_left_are_cleared_away() -> None:
    left = groups._parents()[0] / f"{groups.PREFIX}0_left"
    left.mkdir()
    os.utime(left, (0, 0))
    assert groups.problem.__wrapped__() is None
    assert not left.exists()


@pytest.mark.parametrize(
    ("cgroup", "mounted", "hands_on", "expected"),
    [
        ("4:memory:/job\n8:pids:/", "memory pids", {}, ["memory/job", "pids"]),
        ("0::/a/b", "", {"a/b": "", "a": "cpu memory pids"}, ["unified/a"]),
        ("0::/", "", {"": "memory pids"}, ["unified"]),
        ("0::/a/b", "", {"a/b": "", "a": "cpu"}, "delegates the memory and pids controllers"),
        ("", "", {}, "no control groups"),
    ],
)
def test_where_control_groups_are_made(
    cgroup: str, mounted: str, hands_on: dict[str, str], expected: list[str] | str, tmp_path: Path
) -> None:
    mounts = [f"1 2 0:3 / {tmp_path}/{name} rw - cgroup cgroup rw,{name}" for name in mounted.split()]
    mounts.append(f"1 2 0:3 / {tmp_path}/unified rw - cgroup2 cgroup2 rw")
    (tmp_path / "mountinfo").write_text("\n".join(mounts))
    (tmp_path / "cgroup").write_text(cgroup)
    for path, controllers in hands_on.items():
        (tmp_path / "unified" / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / "unified" / path / "cgroup.subtree_control").write_text(controllers)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            groups._parents(tmp_path)
    else:
        assert groups._parents(tmp_path) == [tmp_path / name for name in expected]


@needs_bubblewrap
def test_it_dies_with_who_started_it(tmp_path: Path) -> None:
    marker = f"{time.time_ns()}"
    code = (
        "from mrl.reward.sandbox import *; "
        f"run_python('import time; time.sleep(1000) # {marker}', limits=Limits(wall_s=500))"
    )
    starter = subprocess.Popen([sys.executable, "-c", code])

    def inside() -> list[psutil.Process]:
        return [p for p in psutil.process_iter(["cmdline"]) if "/program.py" in (p.info["cmdline"] or [])]

    end = time.monotonic() + 60
    while not (started := inside()) and time.monotonic() < end:
        time.sleep(0.05)
    starter.kill()
    starter.wait()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert started and not alive
    for above in groups._parents() if groups.problem() is None else []:  # folders that a later start would remove
        for left in above.glob(f"{groups.PREFIX}{starter.pid}_*"):
            groups._remove(left)


def test_without_bubblewrap_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "find_bwrap", lambda: None)
    with pytest.raises(SandboxError, match="bwrap is not on the PATH.*Install bubblewrap.*reward.code.isolation: none"):
        check_isolation("bubblewrap")


def test_where_namespaces_are_forbidden_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(isolate, "find_bwrap", lambda: str(broken))
    with pytest.raises(SandboxError, match="bwrap: No permissions to create new namespace. Install bubblewrap"):
        check_isolation("bubblewrap")


def test_unisolated_programs_still_have_limits(tmp_path: Path) -> None:
    def bare(program: str, wall_s: float = 30.0) -> ProgramResult:
        return run_python(program, limits=Limits(wall_s=wall_s, memory_mib=128), isolation="none")

    assert bare("print(input())").how == "exit code 1"
    assert bare("while True: pass", 0.5).how == "time out"
    assert "MemoryError" in bare("x = bytearray(1 << 30)").stderr
    assert "MRL" not in bare("import os; print(sorted(os.environ))").stdout
    assert bare("import os, time\nif os.fork() == 0: time.sleep(1000)").ok


def test_programs_may_run_from_several_threads() -> None:
    found: list[str] = []
    threads = [
        threading.Thread(
            target=lambda n=n: found.append(run_python(f"print({n})", limits=LIMITS, isolation="none").stdout)
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [f"{n}\n" for n in range(4)]
