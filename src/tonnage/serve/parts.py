"""A checkpoint's tensors as the headers of its ranks tell them: every cut names the shape it is of."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tonnage.checkpoint.header_check import PREFIX_BYTES
from tonnage.checkpoint.headers import Header, TensorEntry
from tonnage.checkpoint.skeletons import ShardHeader
from tonnage.formats.dtypes import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tonnage.prepare.reader import TensorView

WHOLE = "ranks put together"
"""What stands for the file of tensors that no one file holds."""


def whole_tensors(tensors: Iterable[TensorView]) -> ShardHeader:
    """Return the header of one file that would hold every tensor whole.

    Whether the parts of all ranks make these wholes is for ``tonnage verify`` to say; of a tensor that several ranks
    hold, the first counts.

    Args:
        tensors: Of ranks, those of one or of all of them; dtypes as validated headers have them.
    """
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor in tensors:
        shapes.setdefault(tensor.name, (tensor.dtype, tensor.shape if tensor.cut is None else tensor.cut[2]))
    entries, end = [], 0
    for name, (dtype, shape) in sorted(shapes.items()):
        begin, end = end, end - (-prod(shape) * DTYPE_BITS[dtype] // 8)
        entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, begin=begin, end=end))
    header = Header(tensors=tuple(entries), metadata={}, data_begin=PREFIX_BYTES)
    return ShardHeader(
        shard_file=WHOLE, layer=None, skeleton=header, data_begin=PREFIX_BYTES, file_bytes=PREFIX_BYTES + end
    )
