"""First program in the sandbox: drops root's privileges, applies the limits, then executes the given program.

The interpreter gets this source as text, so it must not depend on mrl. argv[1] is JSON: {"uid": user to switch to, or
null; "tmp_options": options to remount /tmp with, or null; "filter": the system call filter, in hexadecimal, or null;
"limits": {name: value}; "ready_fd": a pipe that gets one byte, then the reason if the program does not start; its start
closes the pipe; "argv": the program}.
"""

import ctypes
import json
import os
import resource
import sys

MS_NOSUID, MS_NODEV, MS_REMOUNT = 2, 4, 32
PR_SET_SECCOMP, PR_CAP_AMBIENT = 22, 47
SECCOMP_MODE_FILTER, PR_CAP_AMBIENT_CLEAR_ALL = 2, 4


class Filter(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("instructions", ctypes.c_ushort), ("program", ctypes.c_char_p)]


def must(what: str, result: int) -> None:
    if result != 0:
        sys.exit(f"{what}: {os.strerror(ctypes.get_errno())}")


plan = json.loads(sys.argv[1])
ready_fd, uid, libc = plan["ready_fd"], plan["uid"], ctypes.CDLL(None, use_errno=True)
if plan["tmp_options"] is not None:
    options = plan["tmp_options"].encode()
    must("mount /tmp", libc.mount(b"tmpfs", b"/tmp", b"tmpfs", MS_REMOUNT | MS_NOSUID | MS_NODEV, options))
if uid is not None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
if plan["filter"] is not None:  # bubblewrap has seen to PR_SET_NO_NEW_PRIVS
    must("drop capabilities", libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0))
    program = bytes.fromhex(plan["filter"])
    must("seccomp", libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(Filter(len(program) // 8, program))))
os.closerange(3, ready_fd)
os.closerange(ready_fd + 1, os.sysconf("SC_OPEN_MAX"))
os.set_inheritable(ready_fd, False)
for name, value in plan["limits"].items():
    resource.setrlimit(getattr(resource, name), (value, value))
os.write(ready_fd, b"1")
try:
    os.execv(plan["argv"][0], plan["argv"])
except OSError as error:
    os.write(ready_fd, str(error).encode())
