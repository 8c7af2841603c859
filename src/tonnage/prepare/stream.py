"""One source tensor into the files of all ranks, window by window.

numpy gathers columns and holds codes; it is imported when that is needed, because many jobs need neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tonnage.formats.dtypes import DTYPE_BITS
from tonnage.prepare.io import NewFile
from tonnage.prepare.windows import (
    BLOCK_ELEMENTS,
    CODE_BITS,
    Cut,
    Grid,
    converted_rows,
    cut_step,
    cut_tensor,
    is_read_in_runs,
    needed_runs,
    overlaps,
    pieces,
    scale_takes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tonnage.prepare.ahead import Reader
    from tonnage.prepare.jobs import Step

    Bytes = NDArray[np.uint8]


class Outputs:
    """The files of one job, by rank, each written from front to back."""

    def __init__(self, files: Mapping[int, tuple[NewFile, int]], on_bytes: Callable[[int], None]) -> None:
        """Take files with their header written, and the length of that header."""
        self._files = files
        self._on_bytes = on_bytes

    def expect(self, rank: int, begin: int, where: str) -> None:
        """Check that the next byte of a rank's payload is this one: the schedule and the steps agree."""
        file, header = self._files[rank]
        if file.position != header + begin:
            raise ValueError(f"{where}: rank {rank} is at byte {file.position - header}, the schedule at {begin}")

    def write(self, rank: int, piece: memoryview) -> None:
        """Add bytes to a rank's file."""
        self._files[rank][0].write(piece)
        self._on_bytes(len(piece))

    def zeros(self, rank: int, nbytes: int) -> None:
        """Add zero bytes to a rank's file."""
        if nbytes:
            self._files[rank][0].zeros(nbytes)
            self._on_bytes(nbytes)


class Stream:
    """Reads one source file and hands out what it read; its buffers are used again and again."""

    def __init__(self, reader: Reader, outputs: Outputs, *, window_bytes: int) -> None:
        """Begin without buffers: they grow to the window, or to one row of a tensor that is larger."""
        self._reader = reader
        self._outputs = outputs
        self._window = window_bytes
        self._read = memoryview(b"")
        self._gathered: Bytes | None = None

    def copy(self, step: Step) -> None:
        """Write every take of a tensor as it is stored."""
        grid, cuts = cut_step(step)
        for take in step.takes:
            self._outputs.expect(take.rank, take.begin, step.source.name)
        if is_read_in_runs(grid, self._window):
            self._copy_runs(step, grid, cuts)
        else:
            self._copy_columns(step, grid, cuts)

    def convert(self, step: Step, quantize: Callable[[NDArray[Any], Bytes, Bytes, int], None]) -> None:
        """Write every take of a tensor as codes, then scales; every row is converted once.

        Args:
            step: A step with ``convert``.
            quantize: Takes rows of the tensor as unsigned integers, fills codes and scales; the last argument is the
                number of the first row.
        """
        import numpy as np  # noqa: PLC0415 - see above

        source = step.source
        rows, columns = source.shape
        width = DTYPE_BITS[source.dtype] // 8
        _, cuts = cut_tensor(step.takes, source.shape, CODE_BITS, where=source.name)
        by_columns = any(take.axis == 1 for take in step.takes)
        needed = converted_rows(cuts, rows, columns)
        for take in step.takes:
            self._outputs.expect(take.rank, take.begin, source.name)
        scales = np.empty((rows, columns // BLOCK_ELEMENTS), np.uint8)
        codes = np.empty((max(1, min(rows, self._window // max(1, columns * width))), columns), np.uint8)
        for first, last in pieces(needed, len(codes)):
            raw = self._window_of(step, first * columns * width, (last - first) * columns * width)
            bits = np.frombuffer(raw, f"<u{width}").reshape(last - first, columns)
            quantize(bits, codes[: last - first], scales[first:last], first)
            for cut in cuts:
                self._write_codes(cut, codes[: last - first], None if by_columns else (first * columns, last * columns))
        self._write_scales(step, scales)

    def _copy_runs(self, step: Step, grid: Grid, cuts: tuple[Cut, ...]) -> None:
        """Rows longer than a window, or a single one: what is taken are runs of bytes."""
        needed = needed_runs(cuts)
        for row in range(grid.rows):
            for window in pieces(needed, self._window):
                view = self._window_of(step, row * grid.row_bytes + window[0], window[1] - window[0])
                for cut in cuts:
                    for begin, end in overlaps(cut.spans, window):
                        self._outputs.write(cut.take.rank, view[begin - window[0] : end - window[0]])
            for cut in cuts:
                self._outputs.zeros(cut.take.rank, cut.take.zero_bytes)

    def _copy_columns(self, step: Step, grid: Grid, cuts: tuple[Cut, ...]) -> None:
        """Many short rows: whole rows are read, and each rank's columns gathered."""
        import numpy as np  # noqa: PLC0415 - see above

        together = self._window // max(1, grid.row_bytes)
        for first, last in pieces([(0, grid.rows)] if grid.row_bytes else [], max(1, together)):
            raw = self._window_of(step, first * grid.row_bytes, (last - first) * grid.row_bytes)
            block = np.frombuffer(raw, np.uint8).reshape(last - first, grid.row_bytes)
            for cut in cuts:
                self._outputs.write(cut.take.rank, self._columns(cut, block, cut.take.zero_bytes))

    def _write_codes(self, cut: Cut, codes: Bytes, window: tuple[int, int] | None) -> None:
        """Write a rank's part of some rows of codes: columns, or those of the rows it takes."""
        if window is None:
            self._outputs.write(cut.take.rank, self._columns(cut, codes))
            return
        flat = codes.reshape(-1).data
        for begin, end in overlaps(cut.spans, window):
            self._outputs.write(cut.take.rank, flat[begin - window[0] : end - window[0]])

    def _write_scales(self, step: Step, scales: Bytes) -> None:
        grid, cuts = cut_tensor(scale_takes(step.takes), scales.shape, CODE_BITS, where=step.source.name)
        for take, cut in zip(step.takes, cuts, strict=True):
            if take.scale_begin is None:
                raise ValueError(f"{step.source.name}: converted, but no place for the scales of rank {take.rank}")
            self._outputs.expect(take.rank, take.scale_begin, step.source.name)
            self._outputs.write(take.rank, self._columns(cut, scales.reshape(grid.rows, grid.row_bytes)))

    def _columns(self, cut: Cut, block: Bytes, zero_bytes: int = 0) -> memoryview:
        """Return the bytes of a cut of every row, gathered; valid until the next call."""
        import numpy as np  # noqa: PLC0415 - see above

        width = cut.nbytes + zero_bytes
        if cut.spans == ((0, block.shape[1]),) and not zero_bytes:
            return block.reshape(-1).data
        nbytes = len(block) * width
        if self._gathered is None or len(self._gathered) < nbytes:
            self._gathered = np.empty(nbytes, np.uint8)
        gathered = self._gathered[:nbytes].reshape(len(block), width)
        place = 0
        for begin, end in cut.spans:
            gathered[:, place : place + end - begin] = block[:, begin:end]
            place += end - begin
        gathered[:, place:] = 0
        return gathered.reshape(-1).data

    def _window_of(self, step: Step, begin: int, nbytes: int) -> memoryview:
        """Read some bytes of a tensor; valid until the next call."""
        if len(self._read) < nbytes:
            self._read = memoryview(bytearray(nbytes))
        piece = self._read[:nbytes]
        self._reader.read_into(piece, step.source.begin + begin)
        return piece
