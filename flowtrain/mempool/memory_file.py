"""Anonymous files of memory (memfd) that other processes of a node open through ``/proc/<pid>/fd/<fd>``.

No file can be left over, and the memory lives as long as any process has it open or mapped.
"""

from __future__ import annotations

import errno
import os

from flowtrain.types.memory import MemoryFile


def open_memory(file: MemoryFile) -> int | str:
    """Open another process's memory for reading; returns a descriptor, or what is there instead.

    That is text for a message: the process may be gone, or another one has its pid. Raises OSError for anything else.
    """
    path = f"/proc/{file.pid}/fd/{file.fd}"
    expected = f"/memfd:{file.name} (deleted)"
    try:
        # The link is checked first, since opening another program's pipe or device may block or have effects.
        found = os.readlink(path)
        if found == expected:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            found = os.readlink(f"/proc/self/fd/{fd}")
            if found == expected:
                return fd
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM):
            raise
        found = os.strerror(error.errno)
    return f"{path} is {found}, not {expected}"
