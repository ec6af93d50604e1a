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
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "fanotify_init": (300, 262),
    "fremovexattr": (199, 16),
    "fsetxattr": (190, 7),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "inotify_init": (253, 26),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "setsockopt": (54, 208),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "shmget": (29, 194),
    "splice": (275, 76),
    "tee": (276, 77),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_PRLIMIT64 = (302, 261)
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag
_AF_UNIX = 1
_MYSELF = 0

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets into struct seccomp_data (little endian)
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

_Instruction = tuple[int, int, str, str]  # code, operand, label if true, label if false; "" goes on


def filter_program() -> bytes | None:
    """Returns the filter for this machine's processor; None for an unknown one."""
    machines = {"x86_64": (_X86_64, 0), "aarch64": (_AARCH64, 1)}
    if platform.machine() not in machines:
        return None
    return _assemble(_instructions(*machines[platform.machine()]))


def _instructions(arch: int, column: int) -> list[_Instruction]:
    return [
        (_LOAD, _ARCH, "", ""),
        (_JUMP_EQ, arch, "", "kill"),
        (_LOAD, _NUMBER, "", ""),
        (_JUMP_GE, _X32_CALLS, "refuse", ""),
        *[(_JUMP_EQ, numbers[column], "refuse", "") for numbers in _REFUSED.values()],
        (_JUMP_EQ, _CLONE3[column], "unknown", ""),
        (_JUMP_EQ, _CLONE[column], "clone", ""),
        (_JUMP_EQ, _PRLIMIT64[column], "prlimit", ""),
        (_JUMP_EQ, _SOCKET[column], "socket", "allow"),
    ]


def _assemble(head: list[_Instruction]) -> bytes:
    """Assembles the checks, then the targets of their labels. A jump counts the instructions that it skips."""
    labelled: list[tuple[str, _Instruction]] = [
        ("clone", (_LOAD, _FIRST_ARGUMENT, "", "")),
        ("", (_JUMP_SET, _NEW_NAMESPACES, "refuse", "allow")),
        ("socket", (_LOAD, _FIRST_ARGUMENT, "", "")),
        ("", (_JUMP_EQ, _AF_UNIX, "allow", "refuse")),
        ("prlimit", (_LOAD, _FIRST_ARGUMENT, "", "")),
        ("", (_JUMP_EQ, _MYSELF, "allow", "refuse")),
        ("allow", (_RETURN, _ALLOW, "", "")),
        ("refuse", (_RETURN, _ERRNO | errno.EPERM, "", "")),
        ("unknown", (_RETURN, _ERRNO | errno.ENOSYS, "", "")),
        ("kill", (_RETURN, _KILL, "", "")),
    ]
    program = [*head, *(instruction for _, instruction in labelled)]
    places = {label: len(head) + i for i, (label, _) in enumerate(labelled) if label}
    return b"".join(
        struct.pack("<HBBI", code, *(places[to] - at - 1 if to else 0 for to in (yes, no)), operand)
        for at, (code, operand, yes, no) in enumerate(program)
    )
