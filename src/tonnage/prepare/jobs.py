"""What preparation does, as values: the seam between the schedule that decides and the worker that moves bytes.

A :class:`Job` turns some tensors of one source file into one file per rank. It is the unit of parallel work and of
resuming: its output files exist under their final names whole, or not at all. Within a job, steps run in the order of
the outputs, so that every output is written from front to back and its digest is known when the last byte is out.

A step reads one source tensor once, window by window along its first stored axis, and hands every rank its part.

A :class:`ShardPass` is some jobs of one file done together, and the digest of that file: what comes over a network is
read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tonnage.formats.dtypes import payload_bytes

ScaleRule = Literal["rceil", "floor", "even", "compressed-tensors"]
"""How the largest value of a block becomes a power of two; see ``prepare/mxfp8.py``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """One stored tensor of the checkpoint.

    Attributes:
        file: Plain file name.
        name: As in its header.
        dtype: As safetensors spells it.
        shape: Stored shape.
        begin: Offset of its first byte in the file, header included.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return payload_bytes(self.dtype, self.shape, where=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """One rank's part of one source tensor.

    Attributes:
        rank: Global rank; index into the job's outputs.
        axis: Stored axis that is cut; ``None`` takes the whole.
        ranges: Stored indices taken on that axis, in output order; a converted tensor counts elements of the source.
        begin: Offset of the taken bytes in the output's payload; of the codes, if converted.
        scale_begin: Offset of the scales in the output's payload, if converted.
        zero_bytes: Zeros after what is taken for every index of the axes before the cut one: padding rows, once, on
            axis 0; padding columns, after every row, on axis 1. Never with ``convert``.
    """

    rank: int
    axis: int | None
    ranges: tuple[tuple[int, int], ...]
    begin: int
    scale_begin: int | None = None
    zero_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One source tensor and who takes what of it.

    Attributes:
        source: The tensor.
        convert: Turned into MXFP8 E4M3 codes and E8M0 scales over blocks of 32 along its last axis: a ``[out, in]``
            weight in BF16, F16 or F32.
        takes: In order of rank.
    """

    source: SourceTensor
    convert: bool
    takes: tuple[Take, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One tensor of an output file.

    Attributes:
        name: As written.
        dtype: As safetensors spells it.
        shape: Shape on this rank.
        begin: Offset in the payload.
        note: What the header's metadata records of the cut: axis, ranges and full shape; empty if whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return payload_bytes(self.dtype, self.shape, where=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One safetensors file of one rank.

    Attributes:
        rank: Global rank.
        path: Relative to the output directory, with ``/``: ``weights/tp8/rank-3/model-00001-of-00096.safetensors``.
        tensors: In file order; offsets without holes.
        metadata: Further strings for the header's ``__metadata__``.
    """

    rank: int
    path: str
    tensors: tuple[OutputTensor, ...]
    metadata: tuple[tuple[str, str], ...] = ()

    @property
    def payload_bytes(self) -> int:
        """Payload bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Some tensors of one source file, and one output file for every rank that takes any.

    Attributes:
        number: Position among the jobs; names it in the journal.
        source_file: Plain file name.
        steps: In the order of the outputs' payloads.
        outputs: One per rank, in order of rank; ranks that take nothing have none.
    """

    number: int
    source_file: str
    steps: tuple[Step, ...]
    outputs: tuple[OutputFile, ...]

    @property
    def read_bytes(self) -> int:
        """Bytes read from the source."""
        return sum(step.source.nbytes for step in self.steps)

    @property
    def written_bytes(self) -> int:
        """Payload bytes written."""
        return sum(output.payload_bytes for output in self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeFile:
    """A small file that comes along: config, tokenizer, and what preparation itself writes.

    Attributes:
        path: Relative to the output directory.
        source: Plain name in the checkpoint; ``None`` if ``content`` is written.
        content: What is written.
    """

    path: str
    source: str | None = None
    content: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of the checkpoint whose digest is taken; nothing is written.

    Attributes:
        name: Plain file name.
    """

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPass:
    """Jobs of one source file that become whole together, after its digest was taken if that is wanted.

    Attributes:
        jobs: In order of their number, which is the order of their tensors in the file.
        digest: Whether the whole file is hashed while it is read.
    """

    jobs: tuple[Job, ...]
    digest: bool


Work = Job | ShardPass | WholeFile | SourceFile
"""What a task does."""


def jobs_of(work: Work) -> tuple[Job, ...]:
    """Return the jobs a task does; none if it copies or hashes a file."""
    if isinstance(work, ShardPass):
        return work.jobs
    return (work,) if isinstance(work, Job) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Everything a preparation does.

    Attributes:
        jobs: Independent of each other. Made when asked for: a large checkpoint has millions of takes.
        files: Further files, written after the last job, made when asked for: an index names every tensor of a rank.
            Small, but for the layer files of a container that stay whole (layout ``hf``).
        ranks: Global ranks that are prepared.
        scale_rule: For converted tensors.
    """

    jobs: Sequence[Job]
    files: Sequence[WholeFile]
    ranks: tuple[int, ...]
    scale_rule: ScaleRule
