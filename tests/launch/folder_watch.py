"""What happens to the files of a folder, as it happens (inotify)."""

import asyncio
import ctypes
import os
import struct

CREATED, OPENED = 0x100, 0x20  # linux/inotify.h

_EVENT = struct.Struct("iIII")


class FolderWatch:
    """Names of files to which something has happened. The folder must exist."""

    def __init__(self, folder, kinds):
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if libc.inotify_add_watch(self._fd, os.fsencode(folder), kinds) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch", str(folder))
        self._names = asyncio.Queue()
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self):
        data, start = os.read(self._fd, 1 << 16), 0
        while start < len(data):
            _, _, _, length = _EVENT.unpack_from(data, start)
            start += _EVENT.size
            self._names.put_nowait(data[start : start + length].rstrip(b"\0").decode())
            start += length

    async def name(self, limit_s=120):
        """The next one."""
        async with asyncio.timeout(limit_s):
            return await self._names.get()

    def close(self):
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
