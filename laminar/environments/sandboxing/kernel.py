"""Calls of Linux that Python's standard library lacks, as functions that raise OSError."""

from __future__ import annotations

import ctypes
import os

SIGKILL = 9
SIGSTOP = 19

CLONE_NEWNS = 0x00020000  # mounts
CLONE_NEWUTS = 0x04000000  # host name
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_AMBIENT_RAISE = 2
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_OVERRIDE = 1
_SECCOMP_MODE_FILTER = 2
_SYS_MOUNT_SETATTR = 442  # the same on all architectures, as every call since 424
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 0x1
_MOUNT_ATTR_NOSUID = 0x2

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """A system call by its number.

    Raises:
        OSError: it failed.
    """
    return _checked(int(_libc.syscall(ctypes.c_long(number), *arguments)), f"system call {number}")


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` (CLONE_NEW...) name for new ones."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _checked(result, f"mount of {source} at {target}")


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def make_read_only(target: str) -> None:
    """Nobody writes below this mount from now on, other mounts inside it included; no set-user-id programs either."""
    attributes = _MountAttributes(attr_set=_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID)
    flags = ctypes.c_uint(_AT_RECURSIVE)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    syscall(_SYS_MOUNT_SETATTR, ctypes.c_int(-1), target.encode(), flags, ctypes.byref(attributes), size)


def pivot_root(new_root: str) -> None:
    """Make a mounted folder the root of this process's mount namespace, and let go of the old one."""
    os.chdir(new_root)
    syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b".")  # the old root lies on top of the new one now
    _checked(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def die_with_parent() -> None:
    """Have this process killed when the thread that started it ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(SIGKILL), 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Descendants whose parents end become children of this process rather than of the system's first one."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0), "prctl")


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def become_user(user: int, *, pass_all_files: bool) -> None:
    """From root to a user (and group) for good. `pass_all_files`: still open files whatever their permissions say.

    With that, something else must keep the process from files: Landlock.
    """
    os.setgroups([])
    os.setresgid(user, user, user)
    if pass_all_files:
        _checked(_libc.prctl(_PR_SET_KEEPCAPS, ctypes.c_ulong(1), 0, 0, 0), "prctl")
    os.setresuid(user, user, user)
    if pass_all_files:
        header = _CapabilityHeader(version=_CAPABILITY_VERSION_3, pid=0)
        bit = 1 << _CAP_DAC_OVERRIDE
        sets = (ctypes.c_uint32 * 6)(bit, bit, bit, 0, 0, 0)  # effective, permitted, inheritable; low word, high word
        _checked(_libc.capset(ctypes.byref(header), ctypes.byref(sets)), "capset")
        raised = _libc.prctl(_PR_CAP_AMBIENT, ctypes.c_ulong(_AMBIENT_RAISE), ctypes.c_ulong(_CAP_DAC_OVERRIDE), 0, 0)
        _checked(raised, "prctl")


def gain_no_privileges() -> None:
    """No program that this process starts gets more rights than it has (set-user-id bits, file capabilities)."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0), "prctl")


def install_filter(program: ctypes.Structure) -> None:
    """Have the kernel check every later system call of this process and its children by a BPF program."""
    _checked(_libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(program)), "prctl")
