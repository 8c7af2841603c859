"""The order of output files, their headers and their index.

Within a file unconverted tensors come first, wider dtypes before narrower ones and otherwise in source order, then the
converted ones, scales right behind their codes. So every tensor begins at a multiple of its element size, and the order
of the steps of a job is the order of the payload on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from tonnage.formats.dtypes import DTYPE_BITS
from tonnage.prepare.documents import PACKAGE_DOCUMENTS, SIGNATURE, SUMMARY
from tonnage.prepare.jobs import Job, OutputFile, OutputTensor, ScaleRule, SourceTensor, Step, Take
from tonnage.prepare.takes import Part
from tonnage.sources.model import is_plain_file_name
from tonnage.topology import Topology
from tonnage.version import __version__

FORMAT = "tonnage.rank/1"
SIDE_FILE_BYTES = 64 << 20
_SIDE_SUFFIXES = (".json", ".model", ".tiktoken", ".jinja", ".txt", ".md")
_SIDE_PREFIXES = ("tokenizer", "LICENSE", "NOTICE")
USUAL_SIDE_FILES = (
    "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "README.md", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json", "hf_quant_config.json", "merges.txt", "params.json",
    "preprocessor_config.json", "processor_config.json", "sentencepiece.bpe.model", "special_tokens_map.json",
    "spiece.model", "tekken.json", "tiktoken.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "video_preprocessor_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
"""What is asked for by name where nothing lists the files of a checkpoint: a web server."""
_NEVER = (
    ".py",
    ".pyc",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".pickle",
    ".safetensors",
    ".index.json",
)
"""Code, weights, pickles, indexes."""
_PREFIX_BYTES = 8
_HEADER_MULTIPLE = 8
_WHOLE = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One source tensor on its way into the outputs of a job.

    Attributes:
        source: The tensor.
        outputs: Name and dtype of what is written for it: itself, or codes and scales.
        taken: Global rank and its parts, one per output; in order of rank.
    """

    source: SourceTensor
    outputs: tuple[tuple[str, str], ...]
    taken: tuple[tuple[int, tuple[Part, ...]], ...]

    @property
    def convert(self) -> bool:
        """Whether it is turned into codes and scales."""
        return len(self.outputs) > 1


def pack(
    number: int,
    source_file: str,
    tensors: Iterable[Packed],
    path: Callable[[int], str],
    metadata: Callable[[int], Mapping[str, str]],
    scale_rule: ScaleRule,
) -> Job:
    """Return the job that writes these tensors, offsets without holes.

    Args:
        number: Of the job.
        source_file: They all come from.
        tensors: In source order.
        path: Of every rank's output.
        metadata: Of every rank's output.
        scale_rule: Of converted tensors; the outputs with any say so.
    """
    ordered = sorted(tensors, key=lambda tensor: (tensor.convert, -alignment(tensor.outputs[0][1])))
    written: dict[int, list[OutputTensor]] = {}
    ends: dict[int, int] = {}
    rules: dict[int, dict[str, str]] = {}
    steps = []
    for tensor in ordered:
        takes = []
        for rank, parts in tensor.taken:
            begins = []
            for (name, dtype), part in zip(tensor.outputs, parts, strict=True):
                begin = ends.get(rank, 0)
                output = OutputTensor(name=name, dtype=dtype, shape=part.shape, begin=begin, note=part.note)
                written.setdefault(rank, []).append(output)
                ends[rank] = begin + output.nbytes
                begins.append(begin)
            if tensor.convert:
                rules[rank] = {"mxfp8_scale_rule": scale_rule}
            takes.append(_take(rank, parts[0], begins))
        steps.append(Step(source=tensor.source, convert=tensor.convert, takes=tuple(takes)))
    outputs = tuple(
        OutputFile(
            rank=rank,
            path=path(rank),
            tensors=tuple(written[rank]),
            metadata=tuple({**metadata(rank), **rules.get(rank, {})}.items()),
        )
        for rank in sorted(written)
    )
    return Job(number=number, source_file=source_file, steps=tuple(steps), outputs=outputs)


def _take(rank: int, part: Part, begins: list[int]) -> Take:
    return Take(
        rank=rank,
        axis=part.axis,
        ranges=part.ranges,
        begin=begins[0],
        scale_begin=begins[1] if len(begins) > 1 else None,
        zero_bytes=part.zero_bytes,
    )


def choose_side_files(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the small files of a checkpoint that come along: configs, tokenizer, templates, licence, model card.

    Args:
        sizes: Bytes of every regular file directly inside the checkpoint.

    >>> choose_side_files({"config.json": 9, "a.py": 9, "LICENSE": 9, "model.safetensors.index.json": 9})
    ('LICENSE', 'config.json')
    """
    return tuple(
        name
        for name, nbytes in sorted(sizes.items())
        if (name.endswith(_SIDE_SUFFIXES) or name.startswith(_SIDE_PREFIXES))
        and nbytes <= SIDE_FILE_BYTES
        and is_side_name(name)
    )


def is_side_name(name: str) -> bool:
    """Whether a file of this name may stand beside the weights.

    No code, weights, pickles or index (another is written), no document of ours, nothing hidden, only plain names.

    >>> is_side_name("README.md"), is_side_name("modeling.py"), is_side_name(".gitattributes")
    (True, False, False)
    """
    ours = (SUMMARY, SIGNATURE, *PACKAGE_DOCUMENTS)
    return not name.endswith(_NEVER) and name not in ours and not name.startswith(".") and is_plain_file_name(name)


def alignment(dtype: str) -> int:
    """Return the multiple of bytes a tensor begins at: its element size, 1 for what is smaller than a byte.

    >>> alignment("BF16"), alignment("F4")
    (2, 1)
    """
    return max(DTYPE_BITS[dtype] // 8, 1)


def header_bytes(output: OutputFile) -> bytes:
    """Return the first bytes of an output file: length, then compact JSON, padded to a multiple of 8 with spaces.

    The metadata comes first. Its ``slices`` is a JSON list with one entry per tensor in the order of the payload: 0 for
    a whole tensor, else axis, ranges and full shape. Without names in it the header needs no escapes, and a reader of
    many headers no slow path.
    """
    metadata = dict(output.metadata)
    if any(tensor.note for tensor in output.tensors):
        metadata["slices"] = "[" + ",".join(tensor.note or _WHOLE for tensor in output.tensors) + "]"
    document: dict[str, object] = {"__metadata__": metadata}
    for tensor in output.tensors:
        offsets = (tensor.begin, tensor.begin + tensor.nbytes)
        document[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
    text = msgspec.json.encode(document)
    text += b" " * (-len(text) % _HEADER_MULTIPLE)
    return len(text).to_bytes(_PREFIX_BYTES, "little") + text


def index_bytes(weight_map: Mapping[str, str], total_bytes: int) -> bytes:
    """Return ``model.safetensors.index.json``: names sorted, indent 2, as Hugging Face writes it."""
    document = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def rank_directory(topology: Topology, rank: int) -> str:
    """Return where a rank's files go: sizes that change the slices are in the name.

    >>> rank_directory(Topology(tp=8), 3), rank_directory(Topology(tp=2, ep=2, pp=3), 5)
    ('weights/tp8/rank-3', 'weights/tp2-ep2-pp3/rank-5')
    """
    further = "".join(f"-{name}{size}" for name, size in (("ep", topology.ep), ("pp", topology.pp)) if size > 1)
    return f"weights/tp{topology.tp}{further}/rank-{rank}"


def file_name(number: int, of: int) -> str:
    """Return the name of an output file; numbers begin at 1.

    >>> file_name(1, 96)
    'model-00001-of-00096.safetensors'
    """
    return f"model-{number:05d}-of-{of:05d}.safetensors"


def rank_metadata(topology: Topology, rank: int) -> dict[str, str]:
    """Return what the header of a rank's file says about itself."""
    pp_rank, tp_rank = divmod(rank, topology.tp)
    return {
        **plain_metadata(),
        "tonnage_format": FORMAT,
        "rank": str(rank),
        "tp_size": str(topology.tp),
        "tp_rank": str(tp_rank),
        "ep_size": str(topology.ep),
        "pp_size": str(topology.pp),
        "pp_rank": str(pp_rank),
    }


def plain_metadata() -> dict[str, str]:
    """Return what every header says: that it is a PyTorch checkpoint, and who wrote it."""
    return {"format": "pt", "tonnage_version": __version__}
