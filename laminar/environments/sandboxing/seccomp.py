"""A filter on system calls (seccomp): what code in a sandbox never needs, the kernel refuses with "not permitted".

It closes what namespaces leave open (new user namespaces, exotic sockets, much of the kernel's attack surface), and it is
what keeps code off the network and off other processes where there are no namespaces. On architectures other than
x86_64 and aarch64 there is no filter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from laminar.environments.sandboxing import kernel

AF_UNIX = 1

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_IF_EQUAL = 0x15
_IF_AT_LEAST = 0x35
_IF_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data (little endian: low half first)
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020000  # all CLONE_NEW... flags
_CLONE3 = 435

# name: (x86_64, aarch64)
_DENIED = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "memfd_create": (319, 279),  # memory that no limit on a process counts; so are the next four
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
_CLONE = (56, 220)
_SOCKET = (41, 198)
# Where other processes can be seen: these only towards oneself.
_SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
}
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _refuse(number: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | number)


def _rule(call: int, checks: bytes) -> bytes:
    """Instructions that run `checks` when the call is this one; the call's number is loaded before and after."""
    return _instruction(_IF_EQUAL, call, 0, len(checks) // 8) + checks


def filter_program(machine: str, *, alone: bool, pid: int) -> bytes | None:
    """BPF instructions for an architecture; None if it has none.

    `alone`: the process has namespaces of its own, so it may signal whatever it sees and open local sockets; else it may
    signal itself (`pid`) only and open no socket at all.
    """
    if machine not in _ARCHITECTURES:
        return None
    architecture, column = _ARCHITECTURES[machine]
    allow, reload = _instruction(_RETURN, _ALLOW), _instruction(_LOAD, _NUMBER)
    argument = _instruction(_LOAD, _FIRST_ARGUMENT)
    rules = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_IF_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL),
        reload,
    ]
    if machine == "x86_64":
        rules += [_instruction(_IF_AT_LEAST, _X32_BIT, 0, 1), _refuse(errno.EPERM)]
    rules += [_rule(numbers[column], _refuse(errno.EPERM)) for numbers in _DENIED.values()]
    rules.append(_rule(_CLONE3, _refuse(errno.ENOSYS)))  # its flags cannot be seen; the C library takes clone then
    new_namespaces = _instruction(_IF_ANY_BIT, _NEW_NAMESPACES, 0, 1)
    rules.append(_rule(_CLONE[column], argument + new_namespaces + _refuse(errno.EPERM) + reload))
    local = argument + _instruction(_IF_EQUAL, AF_UNIX, 1, 0) + _refuse(errno.EPERM) + reload
    rules.append(_rule(_SOCKET[column], local if alone else _refuse(errno.EPERM)))
    if not alone:
        own = _instruction(_IF_EQUAL, pid, 2, 0) + _instruction(_IF_EQUAL, 0, 1, 0)
        rules += [
            _rule(numbers[column], argument + own + _refuse(errno.EPERM) + reload) for numbers in _SIGNALS.values()
        ]
    return b"".join([*rules, allow])


def filter_system_calls(*, alone: bool) -> bool:
    """Confine this process for good; False where there is no filter for it. It must have given up new privileges.

    Raises:
        OSError: the kernel has no seccomp filters.
    """
    instructions = filter_program(os.uname().machine, alone=alone, pid=os.getpid())
    if instructions is None:
        return False
    kernel.install_filter(_Program(length=len(instructions) // 8, instructions=instructions))
    return True
