"""A root file system, a user, a network and process numbers of its own for the code: Linux namespaces.

Inside, the first process is root and makes the mounts; the code runs as INSIDE_USER, which is `nobody` outside where the
warden is root, and the warden's own user elsewhere.
"""

from __future__ import annotations

import os

from laminar.environments.sandboxing import kernel

INSIDE_USER = 1000
NOBODY = 65534
SCRATCH = "/scratch"
ASK = b"?"

_ALL = (
    kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
)  # fmt: skip
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_LARGEST_ROOT = "size=1m,mode=755"  # folders and links only
_SCRATCH_FILES = 4096


def leave_namespaces(to_warden: int, from_warden: int) -> None:
    """Enter new namespaces; the process numbers are new for the children only. The warden answers by `map_users`.

    Args:
        to_warden: end of a pipe to it.
        from_warden: end of a pipe from it.

    Raises:
        OSError: the kernel, or the container that this runs in, does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(_ALL)
    os.write(to_warden, ASK)
    if os.read(from_warden, 1) != b"!":
        raise PermissionError("the users of the new namespace could not be mapped")
    if user:  # only a process inside may say this without privileges
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{INSIDE_USER} {user} 1")
        _write("/proc/self/gid_map", f"{INSIDE_USER} {group} 1")


def map_users(pid: int) -> bytes:
    """The warden's part: root maps users for its child from outside, for it maps two. Returns the answer."""
    try:
        if os.geteuid() == 0:
            for kind in ("uid", "gid"):
                _write(f"/proc/{pid}/{kind}_map", f"0 0 1\n{INSIDE_USER} {NOBODY} 1")
    except OSError:
        return b"-"
    return b"!"


def enter_root(folder: str, *, readable: tuple[str, ...], scratch_bytes: int, files: dict[str, bytes]) -> None:
    """Make `folder` the root: system and Python read-only, and a scratch folder in memory with these files in it.

    Raises:
        OSError: a mount failed.
    """
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, _LARGEST_ROOT)
    for path in (*SYSTEM_PATHS, *readable, *DEVICES):
        _bind(path, folder + path)
    for place in (SCRATCH, "/proc"):
        os.mkdir(folder + place)
    for place in ("/tmp", "/dev/shm"):
        if not os.path.lexists(folder + place):  # else Python itself lies there
            os.symlink(SCRATCH, folder + place)
    kernel.make_read_only(folder)
    options = f"size={scratch_bytes},nr_inodes={_SCRATCH_FILES},mode=700"
    kernel.mount("tmpfs", folder + SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    _mount_proc(folder)
    put_files(folder + SCRATCH, files, INSIDE_USER)
    kernel.pivot_root(folder)


def _mount_proc(folder: str) -> None:
    try:
        kernel.mount("proc", folder + "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    except OSError:  # containers that hide parts of /proc do not allow it; Python does without
        return


def put_files(folder: str, files: dict[str, bytes], user: int) -> None:
    """Write files into a folder, and give all of it to a user."""
    for name, content in files.items():
        path = os.path.join(folder, name)
        with open(path, "wb") as file:
            file.write(content)
        os.chown(path, user, user)
    os.chown(folder, user, user)


def _bind(source: str, target: str) -> None:
    if os.path.lexists(target) or not os.path.exists(source):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    kernel.mount(source, target, "", kernel.MS_BIND | kernel.MS_REC)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
