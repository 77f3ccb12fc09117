"""A seccomp filter: the system calls that no engine needs and that break out of what the rest of confinement holds.

A list of what is refused and not of what is allowed: which calls a numeric library makes changes with every release.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from slimproc.engines.confine.kernel import syscall

_SET_MODE_FILTER = 1
_TSYNC, _SPEC_ALLOW = 1, 4
"""For all threads; and without the mitigation of speculative store bypass that kernels before 5.16 switch on with a
filter: it is there for code that strangers write, and costs a tenth of the speed."""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_ARCHITECTURES = {"x86_64": (0xC000003E, 317), "aarch64": (0xC00000B7, 277)}
"""What the kernel calls them in a filter, and the number of seccomp(2) there."""
_UNKNOWN = 463
"""Calls that are newer than this list do not exist here (nor, so, the 32-bit ones of x86-64); libraries do without."""

REFUSED = {
    # other processes' memory and descriptors
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    # other views of the file system, and ways around paths
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "mknod": (133, None),
    "mknodat": (259, 33), "fanotify_init": (300, 262), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    # namespaces (clone's flags are looked at below)
    "unshare": (272, 97), "setns": (308, 268),
    # doors to the kernel that have often stood open
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "personality": (135, 92), "modify_ldt": (154, None), "iopl": (172, None),
    "ioperm": (173, None), "syslog": (103, 116),
    # the machine itself
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "acct": (163, 89), "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
    # other ways to start a program than the one that Landlock is asked about by path
    "execveat": (322, 281),
}  # fmt: skip
"""Refused with EPERM: name, and number on x86-64 and on arm64 (None: there is none)."""
EXAMINED = {
    "socket": (41, 198), "connect": (42, 203), "clone": (56, 220), "clone3": (435, 435), "prlimit64": (302, 261),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "mmap": (9, 222), "mprotect": (10, 226), "pkey_mprotect": (329, 288),
}  # fmt: skip
"""Refused depending on their arguments, or on the level."""

_AF_UNIX = 1
_PROT_WRITE, _PROT_EXEC = 2, 4
_NAMESPACES = 0x7E020000
"""All of clone's CLONE_NEW flags but the one for clocks, which is clone3's."""

Instruction = tuple[int, int, int, int]
"""Code, how many instructions to skip if it is so and if not, operand."""


def install(*, jit: bool) -> None:
    """Filter this process's calls, in all its threads, for good. Needs no_new_privs. Raises OSError where it cannot."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no filter is written for {machine}")
    code = b"".join(struct.pack("=HBBI", *one) for one in make_filter(machine, jit=jit))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    number = _ARCHITECTURES[machine][1]
    try:
        culprit = syscall(number, _SET_MODE_FILTER, _TSYNC | _SPEC_ALLOW, program)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        culprit = syscall(number, _SET_MODE_FILTER, _TSYNC, program)
    if culprit:
        raise OSError(errno.EAGAIN, f"thread {culprit} has a filter of its own")


def make_filter(machine: str, *, jit: bool) -> list[Instruction]:
    """The program (classic BPF over ``struct seccomp_data``) for ``machine``, as ``platform.machine`` calls it."""
    column = list(_ARCHITECTURES).index(machine)
    refuse, missing = _REFUSE | errno.EPERM, _REFUSE | errno.ENOSYS
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine][0]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _UNKNOWN),
        (_RETURN, 0, 0, missing),
    ]

    def rule(name: str, body: list[Instruction]) -> None:
        number = (REFUSED | EXAMINED)[name][column]
        if number is not None:
            program.extend([(_EQUAL, 0, len(body), number), *body])

    for name in REFUSED:
        rule(name, [(_RETURN, 0, 0, refuse)])
    # Its flags are in memory, where a filter cannot look; without it libraries use clone, whose flags are a number.
    rule("clone3", [(_RETURN, 0, 0, missing)])
    rule("clone", _refuse_if(0, (_ANY_BIT, 0, 1, _NAMESPACES)))
    for name in ("prlimit64", "move_pages", "migrate_pages"):
        rule(name, _refuse_if(0, (_EQUAL, 1, 0, 0)))  # 0: this process, not the front
    if jit:
        rule("socket", _refuse_if(0, (_EQUAL, 1, 0, _AF_UNIX)))
    else:
        for name in ("socket", "connect", "memfd_create", "memfd_secret"):  # the last two: a file for code, in memory
            rule(name, [(_RETURN, 0, 0, refuse)])
        both = _PROT_WRITE | _PROT_EXEC
        rule("mmap", _refuse_if(2, (_AND, 0, 0, both), (_EQUAL, 0, 1, both)))
        for name in ("mprotect", "pkey_mprotect"):
            rule(name, _refuse_if(2, (_ANY_BIT, 0, 1, _PROT_EXEC)))
    program.append((_RETURN, 0, 0, _ALLOW))
    return program


def _refuse_if(argument: int, *test: Instruction) -> list[Instruction]:
    """``test`` ends in a jump over the refusal that stands behind it. Only the low half of an argument is looked at:
    the kernel takes all of these as 32 bits.
    """
    return [
        (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument),
        *test,
        (_RETURN, 0, 0, _REFUSE | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
