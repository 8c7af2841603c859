"""Options that mean the same in every command."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    pass


def context_tokens(text: str | int) -> int:
    """Return ``--context``: tokens, or such as 32k.

    Raises:
        UnitError: It is none.
    """
    from tonnage.units import parse_tokens

    return text if isinstance(text, int) else parse_tokens(text, where="--context")


def here(text: str) -> Path:
    """Return a path to write to; of an address a directory ``s3:`` would be made here.

    Raises:
        UnitError: It is one.
    """
    from tonnage.errors import Problem, UnitError
    from tonnage.sources.addresses import is_remote

    if is_remote(text):
        expected = "a path (one that begins so is written with ./); export --to writes to object stores"
        raise UnitError(Problem(where=text, what="not on this machine", expected=expected))
    return Path(text)


Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A checkpoint directory, or a config.json (planned from its recipe alone); on this machine, or "
        "hf:ORG/NAME[@REVISION], https://HOST/DIR/, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX.",
    ),
]
Offline = Annotated[
    bool,
    typer.Option("--offline", help="Ask no server: what earlier runs fetched and the hub's cache are all there is."),
]
Tp = Annotated[int, typer.Option("--tp", help="Tensor-parallel size.")]
Ep = Annotated[int, typer.Option("--ep", help="Expert-parallel size: 1, or the tensor-parallel size.")]
Pp = Annotated[int, typer.Option("--pp", help="Pipeline-parallel size.")]
TpOfCut = Annotated[int | None, typer.Option("--tp", help="Tensor-parallel size; 1, or what a package is cut for.")]
EpOfCut = Annotated[
    int | None, typer.Option("--ep", help="Expert-parallel size, 1 or that of --tp; 1, or what a package is cut for.")
]
PpOfCut = Annotated[int | None, typer.Option("--pp", help="Pipeline-parallel size; 1, or what a package is cut for.")]
_NOT_PLAIN = re.compile(r"[^\n -~]")
_NOT_PLAIN_OR_COLOUR = re.compile(r"\x1b\[[0-9;]*m|[^\n -~]")
Json = Annotated[bool, typer.Option("--json", help="Print a versioned JSON document instead of a table.")]
Output = Annotated[
    Path,
    typer.Option(
        "-o", "--output", parser=here, metavar="PATH", help="Directory to write; must not exist, or be empty."
    ),
]
GpuName = Annotated[str | None, typer.Option("--gpu", help="GPU out of `tonnage gpus`.")]
SupplySize = Annotated[
    str | None,
    typer.Option("--supply", help="Memory one process can use on a GPU, its context aside, such as 94.010GiB."),
]
Free = Annotated[
    str | None,
    typer.Option("--free", help="Free memory of this machine's GPUs by the driver: all, or such as 0,2."),
]
Utilization = Annotated[
    str | None, typer.Option("--utilization", help="The share of the GPU that vLLM is started with, such as 0.92.")
]
Reserve = Annotated[
    str, typer.Option("--reserve", help="Memory held per rank for everything that is not planned, such as 6GiB.")
]
Dcp = Annotated[int, typer.Option("--dcp", help="Decode-context-parallel size; moves no weights.")]
Draft = Annotated[
    str | None, typer.Option("--draft", help="A draft checkpoint, placed like the target; anywhere SOURCE may be.")
]
DraftBytes = Annotated[
    str, typer.Option("--draft-bytes", help="Or only its bytes, cut evenly, such as 5GiB or 5373504512.")
]
ConvertTo = Annotated[
    Literal["none", "mxfp8", "mxfp8-experts"],
    typer.Option("--convert", help="What preparation does to BF16 projections; mxfp8 leaves routed experts."),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context", parser=context_tokens, metavar="TOKENS", help="Longest context: tokens, or 32k or 1M; k is 1,024."
    ),
]
ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="What is to be served: cC-pP, requests at once and tokens of a prefill step, such as c4-p4096 or c4-p8k; "
        "of a package, by default what it was made for.",
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option("--kv-dtype", help="Dtype of the KV cache: auto, bf16, fp8, nvfp4, int8, int4, or the engine's word."),
]
KvBytes = Annotated[
    str | None, typer.Option("--kv-bytes", help="Cache per rank, such as 20GiB; by default what the profile needs.")
]
EngineVersion = Annotated[
    str | None, typer.Option("--engine-version", help="Release of the engine: bounds are tighter where it is known.")
]
Eager = Annotated[bool, typer.Option("--eager", help="No CUDA graphs.")]
Method = Annotated[
    Literal["eagle", "eagle3", "mtp", "dflash", "dflash2", "dspark", "draft-model", "ngram", "suffix"] | None,
    typer.Option("--draft-method", help="How tokens are drafted; by default as the draft checkpoint is made for."),
]
DraftTokens = Annotated[int | None, typer.Option("--draft-tokens", min=1, help="Tokens drafted per step.")]


def emit(text: str) -> None:
    """Print a result on stdout, escaped as :func:`visible` does."""
    typer.echo(visible(text.rstrip("\n")))


def visible(text: str) -> str:
    r"""Return text a terminal can be given: colours and line ends stay, what else cannot be seen is escaped.

    Whatever reads an input escapes what it says of it; this holds for what was forgotten, such as names of files.

    >>> print(visible("caf\u00e9 \x1b]0;title\x07 \u202e"))
    café \x1b]0;title\x07 \u202e
    """
    return _NOT_PLAIN_OR_COLOUR.sub(_spelled, text)


def _spelled(match: re.Match[str]) -> str:
    one = match[0]
    return one if one.isprintable() or len(one) > 1 else one.encode("unicode_escape", "backslashreplace").decode()


def emit_json(document: dict[str, Any]) -> None:
    """Print a document on stdout; what cannot be seen in it is escaped, as a terminal may obey it."""
    typer.echo(json_text(document))


def json_text(document: dict[str, Any]) -> str:
    r"""Return a document as JSON; of Unicode only what is printable stands as it is.

    >>> print(json_text({"name": "\u00e9 \x9b2J \x7f \U000e0041"}))
    {
      "name": "é \u009b2J \u007f \udb40\udc41"
    }
    """
    return _NOT_PLAIN.sub(_escaped, json.dumps(document, indent=2, ensure_ascii=False))


def _escaped(match: re.Match[str]) -> str:
    one = match[0]
    units = one.encode("utf-16-be", "surrogatepass").hex()
    return one if one.isprintable() else "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def note(text: str) -> None:
    """Print progress or a warning on stderr; where nobody can be told, the exit code alone says it."""
    try:
        typer.echo(visible(text), err=True)
    except OSError:  # what could not be said is not tried again at exit, which would have a code of its own
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
