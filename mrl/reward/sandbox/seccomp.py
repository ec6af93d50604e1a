"""System calls that a sandboxed program does not need, as the BPF program for PR_SET_SECCOMP.

Namespaces hide resources, but do not block: memory beyond RLIMIT_AS and the size of /tmp (System V segments, memfd,
extended attributes, pages and inotify marks that the kernel holds, larger socket buffers), network families without
namespaces (vsock), and rarely used parts of the kernel. A refused call fails with EPERM. clone3, whose flags a filter
cannot read, fails with ENOSYS: the C library then uses clone. Without root the sandbox's first process runs as the
program's own user: a process can set only its own limits.
"""

from __future__ import annotations

import errno
import platform
import struct

_X86_64 = 0xC000003E
_AARCH64 = 0xC00000B7
_X32_CALLS = 0x40000000  # the x32 numbers of x86-64, which would name every call a second time

_REFUSED: dict[str, tuple[int, int]] = {  # name: (x86-64, aarch64)
    "add_key": (248, 217), "bpf": (321, 280), "chroot": (161, 51),
    "fanotify_init": (300, 262), "fremovexattr": (199, 16), "fsetxattr": (190, 7),
    "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "inotify_init": (253, 26), "inotify_init1": (294, 26), "io_setup": (206, 0),
    "io_uring_setup": (425, 425), "keyctl": (250, 219), "lremovexattr": (198, 15),
    "lsetxattr": (189, 6), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "mq_open": (240, 180), "msgget": (68, 186), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "perf_event_open": (298, 241), "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "ptrace": (101, 117), "removexattr": (197, 14), "removexattrat": (466, 466),
    "request_key": (249, 218), "semget": (64, 190), "setns": (308, 268),
    "setsockopt": (54, 208), "setxattr": (188, 5), "setxattrat": (463, 463),
    "shmget": (29, 194), "splice": (275, 76), "tee": (276, 77),
    "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}  # fmt: skip
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_PRLIMIT64 = (302, 261)
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag
_AF_UNIX = 1
_MYSELF = 0

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets into struct seccomp_data (little endian)
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

_Instruction = tuple[int, int, int, int]  # code, instructions to skip if true, and if false, operand


def filter_program() -> bytes | None:
    """Returns the filter for this machine's processor; None for an unknown one."""
    machines = {"x86_64": (_X86_64, 0), "aarch64": (_AARCH64, 1)}
    if platform.machine() not in machines:
        return None
    arch, column = machines[platform.machine()]
    allow, refuse = _returned(_ALLOW), _returned(_ERRNO | errno.EPERM)
    first_argument = (_LOAD, 0, 0, _FIRST_ARGUMENT)
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQ, 1, 0, arch),
        _returned(_KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_if(_JUMP_GE, _X32_CALLS, refuse),
        *(instruction for numbers in _REFUSED.values() for instruction in _if(_JUMP_EQ, numbers[column], refuse)),
        *_if(_JUMP_EQ, _CLONE3[column], _returned(_ERRNO | errno.ENOSYS)),
        *_if(_JUMP_EQ, _CLONE[column], first_argument, *_if(_JUMP_SET, _NEW_NAMESPACES, refuse), allow),
        *_if(_JUMP_EQ, _PRLIMIT64[column], first_argument, *_if(_JUMP_EQ, _MYSELF, allow), refuse),
        *_if(_JUMP_EQ, _SOCKET[column], first_argument, *_if(_JUMP_EQ, _AF_UNIX, allow), refuse),
        allow,
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _if(test: int, operand: int, *body: _Instruction) -> tuple[_Instruction, ...]:
    """Returns a test of the loaded value, and the instructions that run if it holds, of which the last returns."""
    return ((test, 0, len(body), operand), *body)


def _returned(value: int) -> _Instruction:
    return (_RETURN, 0, 0, value)
