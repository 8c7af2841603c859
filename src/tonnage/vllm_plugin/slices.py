"""A tensor of which only one rank's part is there, for code that expects the whole and takes its part of it.

It has the shape of the whole. Views (narrow, select, transpose) only change what is meant; as soon as the elements
meant are all there, an ordinary tensor over the mapped file takes its place. So an engine's own arithmetic decides what
a rank takes, replication and fusion included, and where it disagrees with the cut, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from tonnage.errors import Problem
from tonnage.vllm_plugin.opening import LoadError

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements that are there: where they begin on the cut axis of the whole, and the elements."""

    begin: int
    tensor: torch.Tensor


class SlicedTensor(torch.Tensor):  # type: ignore[misc]
    """A whole tensor of which some ranges of one axis are there."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001 - as PyTorch documents for such classes
    of: str
    axis: int
    pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(
        cls: type[Self], name: str, shape: Sequence[int], axis: int, pieces: Sequence[Piece], dtype: torch.dtype
    ) -> Self:
        """Take what is there; ``axis`` is the one that is cut."""
        device = pieces[0].tensor.device if pieces else torch.device("cpu")
        whole: Self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)  # noqa: SLF001
        whole.of, whole.axis, whole.pieces = name, axis, tuple(pieces)
        return whole

    def __repr__(self) -> str:
        """Return name, shape and what is there."""
        held = ", ".join(f"{piece.begin}:{_end(piece, self.axis)}" for piece in self.pieces)
        return f"SlicedTensor({self.of!r}, {tuple(self.shape)}, axis {self.axis} has [{held}])"

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follow views; anything else is done with the elements."""
        kwargs = kwargs or {}
        follow = _FOLLOWED.get(func)
        if follow is not None and isinstance(args[0], SlicedTensor):
            return follow(*args, **kwargs)
        args, kwargs = tree_map_only(SlicedTensor, _elements, (args, kwargs))
        return func(*args, **kwargs)


def sliced(
    name: str, part: torch.Tensor, axis: int, ranges: Sequence[tuple[int, int]], shape: Sequence[int]
) -> torch.Tensor:
    """Return a whole tensor of which ``part`` is there.

    Args:
        name: Of the tensor, for refusals.
        part: The ranges, one after the other; padding may follow and is not taken.
        axis: Cut axis.
        ranges: Indices of the whole on it.
        shape: Of the whole.
    """
    pieces, at = [], 0
    for begin, end in ranges:
        pieces.append(Piece(begin, part.narrow(axis, at, end - begin)))
        at += end - begin
    return _settled(SlicedTensor(name, shape, axis, pieces, part.dtype))


def _end(piece: Piece, axis: int) -> int:
    return piece.begin + int(piece.tensor.shape[axis])


def _settled(whole: SlicedTensor) -> torch.Tensor:
    """Return an ordinary tensor if one piece is everything that is meant, or nothing is, else the same."""
    if not whole.numel():
        return torch.empty(whole.shape, dtype=whole.dtype, device=whole.device)
    if len(whole.pieces) == 1 and whole.pieces[0].tensor.shape == whole.shape:
        return whole.pieces[0].tensor
    return whole


def _elements(whole: SlicedTensor) -> torch.Tensor:
    """Return all elements.

    Raises:
        LoadError: Not all are there.
    """
    begins = [piece.begin for piece in whole.pieces]
    ends = [_end(piece, whole.axis) for piece in whole.pieces]
    if not whole.pieces or begins != [0, *ends[:-1]] or ends[-1] != whole.shape[whole.axis]:
        held = ", ".join(f"{begin}..{end}" for begin, end in zip(begins, ends, strict=True))
        raise LoadError(
            Problem(
                where="vLLM",
                tensor=whole.of,
                what=f"takes more than the cut of this rank, of what it sees as {list(whole.shape)}",
                expected=f"within {held or 'nothing'} of axis {whole.axis}",
            )
        )
    return torch.cat([piece.tensor for piece in whole.pieces], whole.axis)


# --- views ------------------------------------------------------------------------------------------------------------


def _slice(
    whole: SlicedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> torch.Tensor:
    dim %= whole.dim()
    begin, behind, step = slice(start, end, step).indices(whole.shape[dim])
    size = len(range(begin, behind, step))
    shape = (*whole.shape[:dim], size, *whole.shape[dim + 1 :])
    if dim != whole.axis:
        return _each(whole, shape, whole.axis, lambda part: _ATEN.slice.Tensor(part, dim, start, end, step))
    if step != 1:
        whole_elements: torch.Tensor = _ATEN.slice.Tensor(_elements(whole), dim, start, end, step)
        return whole_elements
    pieces = []
    for piece in whole.pieces:
        first, last = max(piece.begin, begin), min(_end(piece, dim), begin + size)
        if first < last:
            pieces.append(Piece(first - begin, piece.tensor.narrow(dim, first - piece.begin, last - first)))
    return _settled(SlicedTensor(whole.of, shape, dim, pieces, whole.dtype))


def _select(whole: SlicedTensor, dim: int, index: int) -> torch.Tensor:
    dim %= whole.dim()
    index %= whole.shape[dim]
    shape = (*whole.shape[:dim], *whole.shape[dim + 1 :])
    if dim != whole.axis:
        return _each(whole, shape, whole.axis - (dim < whole.axis), lambda part: part.select(dim, index))
    for piece in whole.pieces:
        if piece.begin <= index < _end(piece, dim):
            return piece.tensor.select(dim, index - piece.begin)
    return SlicedTensor(whole.of, shape, 0, (), whole.dtype)  # an expert of another rank: nothing of it is there


def _permute(whole: SlicedTensor, dims: Sequence[int]) -> torch.Tensor:
    dims = [dim % whole.dim() for dim in dims]
    shape = [whole.shape[dim] for dim in dims]
    return _each(whole, shape, dims.index(whole.axis), lambda part: part.permute(dims))


def _transpose(whole: SlicedTensor, first: int, second: int) -> torch.Tensor:
    dims = list(range(whole.dim()))
    dims[first], dims[second] = dims[second], dims[first]
    return _permute(whole, dims)


def _t(whole: SlicedTensor) -> torch.Tensor:
    return _permute(whole, list(reversed(range(whole.dim()))))


def _unsqueeze(whole: SlicedTensor, dim: int) -> torch.Tensor:
    dim %= whole.dim() + 1
    shape = (*whole.shape[:dim], 1, *whole.shape[dim:])
    return _each(whole, shape, whole.axis + (dim <= whole.axis), lambda part: part.unsqueeze(dim))


def _element_by_element(change: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return what copies or converts the elements that are there."""

    def follow(whole: SlicedTensor, *arguments: Any, **named: Any) -> torch.Tensor:
        pieces = [Piece(piece.begin, change(piece.tensor, *arguments, **named)) for piece in whole.pieces]
        dtype = pieces[0].tensor.dtype if pieces else named.get("dtype") or whole.dtype
        return SlicedTensor(whole.of, whole.shape, whole.axis, pieces, dtype)

    return follow


def _split(whole: SlicedTensor, size: int, dim: int = 0) -> list[torch.Tensor]:
    total = whole.shape[dim]
    return [_slice(whole, dim, begin, min(begin + size, total)) for begin in range(0, total, size)]


def _split_with_sizes(whole: SlicedTensor, sizes: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [_slice(whole, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _unbind(whole: SlicedTensor, dim: int = 0) -> list[torch.Tensor]:
    return [_select(whole, dim, index) for index in range(whole.shape[dim])]


def _each(
    whole: SlicedTensor, shape: Sequence[int], axis: int, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the tensor of another shape and cut axis that every piece is changed to."""
    pieces = [Piece(piece.begin, change(piece.tensor)) for piece in whole.pieces]
    return _settled(SlicedTensor(whole.of, shape, axis, pieces, whole.dtype))


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    _ATEN.slice.Tensor: _slice,
    _ATEN.select.int: _select,
    _ATEN.permute.default: _permute,
    _ATEN.transpose.int: _transpose,
    _ATEN.t.default: _t,
    _ATEN.unsqueeze.default: _unsqueeze,
    **{
        change: _element_by_element(change)
        for change in (_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default, _ATEN._to_copy.default)  # noqa: SLF001
    },
    _ATEN.split.Tensor: _split,
    _ATEN.split_with_sizes.default: _split_with_sizes,
    _ATEN.unbind.int: _unbind,
}
