"""What several test files start from."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tonnage.api import Checkpoint, open_checkpoint, read_config
from tonnage.checkpoint.config import parse_config
from tonnage.checkpoint.skeletons import HeaderReader, ShardHeader
from tonnage.formats.exl3_v1 import SlotGeometry
from tonnage.memory.cache import LayerCache
from tonnage.recipes.blueprint import blueprint_of

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""A config of tensors small enough to write out."""

PATIENCE = 120
"""Seconds after which a test gives up what must happen: only a fault takes them, however busy the machine is."""
COMMAND = (sys.executable, "-P", "-c", "from tonnage.cli import main; main()")
"""The command in a process of its own, whatever directory that starts in."""
KIMI_K3 = SlotGeometry(
    num_experts=896,
    hidden_size=3584,
    intermediate_size=3072,
    moe_layer_indices=tuple(range(1, 93)),
    codebook="lut_e4m3",
    bits=2,
    pre_block=512,
    post_block=128,
    row_alignment=4096,
    extent_alignment_slots=4,
    extent_barriers=(48,),
)
SMALL = SlotGeometry(
    num_experts=4, hidden_size=512, intermediate_size=1024, moe_layer_indices=(1, 3), codebook="mcg", bits=4
)
PAIRS = SlotGeometry(
    num_experts=3,
    hidden_size=256,
    intermediate_size=512,
    moe_layer_indices=(0,),
    codebook="mcg",
    pair_kinds=("P33", "P24", "P43"),
    row_alignment=4096,
    extent_alignment_slots=8,
)


def read_shards(files: dict[str, list[str]]) -> dict[str, ShardHeader]:
    """Read the headers of shards of one-byte tensors, by file name."""
    reader = HeaderReader()
    shards = {}
    for shard_file, names in files.items():
        header = {name: {"dtype": "U8", "shape": [], "data_offsets": [n, n + 1]} for n, name in enumerate(names)}
        raw = json.dumps(header).encode()
        prefix = len(raw).to_bytes(8, "little") + raw
        shards[shard_file] = reader.read(prefix, shard_file=shard_file, file_bytes=len(prefix) + len(names))
    return shards


def load_script(name: str) -> ModuleType:
    """Import a file of ``scripts`` as a module."""
    path = Path(__file__).resolve().parent.parent / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@cache
def opened(name: str) -> Checkpoint:
    """Open a file of ``data/configs``, once."""
    return open_checkpoint(Path(__file__).parent / "data" / "configs" / f"{name}.json")


def caches_of(config: str | dict[str, Any]) -> tuple[LayerCache, ...]:
    """Return what the layers of a model keep: a file of ``data/configs``, or a config written out."""
    if isinstance(config, dict):
        return blueprint_of(parse_config(config, name="config.json")).caches
    return blueprint_of(read_config(Path(__file__).parent / "data" / "configs" / f"{config}.json")).caches


def rehearse(path: Path, fields: dict[str, Any] = LLAMA, **options: Any) -> Path:
    """Write a checkpoint of a config, small with random weights unless the options say otherwise."""
    from tonnage.synth.io import RehearsalOptions, write_rehearsal

    write_rehearsal(parse_config(fields, name="small"), path, RehearsalOptions(**{"scaled_down": True, **options}))
    return path


def flip_last(path: Path) -> None:
    """Change the last byte of a file."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def prepare_small(source: Path, output: Path, **options: Any) -> Path:
    """Prepare a small Llama for two ranks, converted, or as the options say; write it first if it is not there."""
    from tonnage.api import PlanRequest, open_checkpoint, plan_checkpoint
    from tonnage.prepare.request import PrepareOptions, prepare_placement
    from tonnage.prepare.run import run_preparation
    from tonnage.report.documents import plan_document

    if not source.exists():
        rehearse(source)
        (source / "tokenizer.json").write_text('{"a": 1}')
    request = PlanRequest(
        **{"tp": 2, "convert": "mxfp8"} | {key: options.pop(key) for key in ("tp", "convert") if key in options}
    )
    checkpoint = open_checkpoint(str(source))
    plan = plan_checkpoint(checkpoint, request)
    preparation = prepare_placement(
        plan.placement,
        source,
        output,
        PrepareOptions(workers=1, **options),
        headers=checkpoint.headers,
        digest=checkpoint.digest,
        plan=plan_document(checkpoint, request, plan, suggestions=()),
    )
    run_preparation(preparation, lambda _: None)
    return output


def write_key(folder: Path, name: str = "key", curve: str = "SECP256R1") -> tuple[Path, Path]:
    """Write a new elliptic curve key as PEM files; return the paths of its private and public half."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(getattr(ec, curve)())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    pem = serialization.Encoding.PEM
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def certify(
    subject: str,
    key: Any,
    issuer: str,
    by: Any,
    *,
    authority: bool,
    signs: bool = True,
    years: tuple[int, int] = (2020, 2021),
) -> Any:
    """Return a certificate of a private key, issued with another; by default it is long over."""
    import datetime as dt

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    unused = (
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    usage = {"digital_signature": signs and not authority, "key_cert_sign": authority, "key_agreement": not signs}
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (subject, issuer)]
    begin, end = (dt.datetime(year, 1, 1, tzinfo=dt.UTC) for year in years)
    return (
        x509.CertificateBuilder(names[1], names[0], key.public_key(), x509.random_serial_number(), begin, end)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**dict.fromkeys(unused, False), **usage), critical=True)
        .sign(by, hashes.SHA256())
    )


def without_privilege() -> None:
    """Give up reading what nobody may read (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH), which root may."""
    drop_from_bounding_set = 24
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(drop_from_bounding_set, capability)


def until(is_so: Callable[[], object]) -> None:
    """Wait for something that takes a moment, and not for ever."""
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def kept_port() -> Iterator[int]:
    """Yield a port that nobody else is given meanwhile: it is bound, and only who names it and may share it gets it."""
    with closing(socket.socket()) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def ask(method: str, url: str, **how: Any) -> Any:
    """Ask a server that is here, whatever proxy the environment names, and be patient: its machine may be busy."""
    import httpx2

    return httpx2.request(method, url, timeout=PATIENCE, trust_env=False, **how)


def file_contents(directory: Path) -> dict[str, bytes]:
    """Return every file below a directory by path."""
    found = (path for path in directory.rglob("*") if not path.is_dir())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


@contextmanager
def served(
    place: Path, *words: object, workers: int = 1, less: Sequence[str] = (), before: Sequence[str] = ()
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run ``tonnage ui`` in a directory, and yield its address and its process.

    A busy machine is no reason for it to cut a question off; ``less`` are assignments to names of ``tonnage.ui.serve``,
    and ``before`` is the command that starts it, such as one that sets limits.
    """
    patient = f"settings.Settings = partial(settings.Settings, seconds={PATIENCE})"
    changed = "; ".join((patient, *(f"serve.{one}" for one in less)))
    code = f"from functools import partial; from tonnage.ui import serve, settings; {changed}; {COMMAND[-1]}"
    options = ("--port", "0", "--no-browser", "--workers", str(workers))
    command = [*before, *COMMAND[:-1], code, "ui", *map(str, words), *options]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def write_shards(directory: Path, *, shards: int = 3, pretty: bool = True) -> Path:
    """Write a small Llama as several shard files with an index, its weights sparse; return the directory."""
    rehearse(directory, scaled_down=False)
    whole = directory / "model.safetensors"
    raw = whole.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    whole.unlink()
    names = [name for name in header if name != "__metadata__"]
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        mine, begin = {}, 0
        for name in names[number::shards]:
            nbytes = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
            mine[name] = header[name] | {"data_offsets": [begin, begin + nbytes]}
            index[name], begin = file, begin + nbytes
        text = json.dumps(mine, separators=(",", ":")).encode()
        with (directory / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + begin)
    document = {"metadata": {"total_size": sum(tensor_bytes(header).values())}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(document, indent=2 if pretty else None))
    return directory


def tensor_bytes(header: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of every tensor of a header."""
    return {
        name: entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def header_bytes_in(directory: Path) -> int:
    """Return the bytes of all headers of a checkpoint, lengths included."""
    found = 0
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            found += 8 + int.from_bytes(file.read(8), "little")
    return found
