"""The compiler of the kernels is not loaded into too little address space."""

from __future__ import annotations

import subprocess
import sys

from tonnage.prepare.compiler_room import COMPILER_BYTES

ROOM = """
import resource, sys
from tonnage.prepare.compiler_room import check_compiler_room
room = int(sys.argv[1])
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + room, held + room))
check_compiler_room()
{then}
"""
QUANTIZE = """
import numpy as np
from tonnage.prepare.mxfp8 import quantize
codes, scales = np.zeros((4, 64), np.uint8), np.zeros((4, 2), np.uint8)
quantize(np.full((4, 64), 0x3F80, np.uint16), "BF16", codes, scales, rule="rceil")
print(np.unique(scales))
"""


def run(room_bytes: int, then: str = "") -> subprocess.CompletedProcess[str]:
    environment = {"OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, "-c", ROOM.format(then=then), str(room_bytes)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_too_little_room_is_refused_with_what_it_takes() -> None:
    done = run(COMPILER_BYTES - (1 << 20))
    assert done.returncode == 1
    assert done.stderr.endswith("MemoryError: 320 MiB of address space for the compiler of the kernels\n")


def test_the_room_that_is_asked_for_does() -> None:
    done = run(COMPILER_BYTES + (8 << 20), QUANTIZE)
    assert (done.returncode, done.stdout) == (0, "[119]\n"), done.stderr
