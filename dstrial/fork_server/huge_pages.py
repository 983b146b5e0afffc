"""Moves a process's memory into huge pages, which makes its forks cheaper.

A fork copies the page tables of its parent: an entry for each 4 KiB, or one for each huge page, of 2 MiB on x86. What either of
them writes later is copied by 4 KiB all the same. Needs Linux 6.1 (``MADV_COLLAPSE``, madvise(2)); elsewhere nothing is moved.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_MADV_COLLAPSE = 25  # asm-generic/mman-common.h
_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def use_huge_pages() -> int:
    """Move this process's own memory, not that of files; return the bytes moved.

    To be called before there are forks, which share the pages that are moved away from.
    """
    try:
        size = int(_SIZE_FILE.read_text(encoding="ascii"))
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        libc = ctypes.CDLL(None)
    except (OSError, ValueError):
        return 0
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    moved = 0
    for line in maps.splitlines():
        places, rights, *_, inode_or_name = line.split(maxsplit=5)
        if not rights.startswith("rw-p") or inode_or_name not in ("0", "[heap]"):
            continue
        begin, end = (int(place, 16) for place in places.split("-"))
        for address in range(-(-begin // size) * size, end - size + 1, size):
            # One after the other: the first that cannot be moved, as it was never written to, would end a larger call.
            moved += size if libc.madvise(address, size, _MADV_COLLAPSE) == 0 else 0
    return moved
