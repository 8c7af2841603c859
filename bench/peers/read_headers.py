"""Read all headers of a directory one way and say how long it took: run by ``reading.py`` in a process of its own.

    python read_headers.py WAY DIRECTORY

Prints a JSON object: seconds without importing, tensors seen, peak memory of the process. A refusal is its ``error``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def opened(directory: Path) -> int:
    """Open every file with safetensors and count its tensors: the library has then checked its header."""
    from safetensors import safe_open

    count = 0
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            count += len(file.keys())
    return count


def listed(directory: Path) -> int:
    """Open every file with safetensors and ask dtype and shape of every tensor, as a planner must."""
    from safetensors import safe_open

    count = 0
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                part = file.get_slice(name)
                count += bool(part.get_dtype()) + 0 * len(part.get_shape())
    return count


def own(directory: Path) -> int:
    """Read and check every header and the index, with this project's reader."""
    from tonnage.checkpoint.io import read_checkpoint_headers

    return sum(len(shard.skeleton.tensors) for shard in read_checkpoint_headers(directory).shards)


def peak_kib() -> int:
    """Return the most memory this process had; ``ru_maxrss`` would be that of the parent where the parent had more."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


WAYS: dict[str, Callable[[Path], int]] = {"opened": opened, "listed": listed, "tonnage": own}


def main() -> int:
    """Run one way."""
    way, directory = WAYS[sys.argv[1]], Path(sys.argv[2])
    if way is own:
        import tonnage.checkpoint.io  # noqa: F401 - imported before the clock starts
    else:
        import numpy as np  # noqa: F401 - as above
        import safetensors  # noqa: F401 - as above
    begin = time.perf_counter()
    try:
        answer = {"tensors": way(directory)}
    except Exception as error:  # noqa: BLE001 - whatever it is refused with is the answer
        answer = {"error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "peak_mib": peak_kib() >> 10, **answer}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
