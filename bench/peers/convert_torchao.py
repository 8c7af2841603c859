"""Convert the projections of a checkpoint to MXFP8 with torchao, as a script around its ``to_mx`` does.

    python convert_torchao.py eager|compiled SOURCE OUTPUT

Run by ``converting.py`` where torch and torchao are. Every file is read, converted and written with safetensors, and
synced; embeddings, head and norms stay. Prints the seconds without importing and, for ``compiled``, without compiling.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

BLOCK = 32
CONVERTED = "_proj.weight"


def quantize(weight: Any) -> tuple[Any, Any]:
    """Return scales and codes of one weight."""
    scales, codes = to_mx(weight, torch.float8_e4m3fn, BLOCK, ScaleCalculationMode.RCEIL)
    return scales, codes


def convert(source: Path, output: Path, how: Any) -> None:
    """Convert one file after the other."""
    output.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        tensors: dict[str, Any] = {}
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                weight = file.get_tensor(name)
                if name.endswith(CONVERTED):
                    scales, codes = how(weight)
                    tensors[name], tensors[f"{name}_scale"] = codes, scales.view(torch.uint8)
                else:
                    tensors[name] = weight
        save_file(tensors, output / path.name)
        with (output / path.name).open("rb") as written:
            os.fsync(written.fileno())


def main() -> int:
    """Convert, and print how long it took."""
    how, source, output = quantize, Path(sys.argv[2]), Path(sys.argv[3])
    if sys.argv[1] == "compiled":
        how = torch.compile(quantize)
        for shape in ((2048, 2048), (512, 2048), (8192, 2048), (2048, 8192)):
            how(torch.zeros(shape, dtype=torch.bfloat16))
    begin = time.perf_counter()
    convert(source, output, how)
    print(time.perf_counter() - begin)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
