"""Whether the compiler of the kernels can be loaded at all."""

from __future__ import annotations

import mmap
from functools import cache

COMPILER_BYTES = 320 << 20
"""Address space for numpy, numba and compiling: 272 to 280 MiB measured with one thread of BLAS, and some over."""


@cache
def check_compiler_room() -> None:
    """Find out before the compiler is loaded that a limit leaves it no room; call this before it is imported.

    In the middle of loading it, where one small allocation after the other fails, CPython 3.11 was seen to spin for
    ever instead of raising anything.

    Raises:
        MemoryError: The process may not have so much address space.
    """
    try:
        mmap.mmap(-1, COMPILER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
    except OSError as error:
        raise MemoryError(f"{COMPILER_BYTES >> 20} MiB of address space for the compiler of the kernels") from error
