"""Time ``tonnage verify`` against the fastest parallel hash of the same files, and against stock ``model_signing``.

    python bench/bench_verify.py [--quick] [--directory DIR] [--rounds 7]

Two packages of 4 GB, eight weight files and one, each with BLAKE3 and with SHA-256 digests, read from the page cache.
The fastest parallel hash is the best of those written here: a thread per core that reads or maps one file after the
other, and, for BLAKE3, all cores on one mapped file. Every way runs in a process of its own and says how long it took
inside, without starting; ways are taken in turn, and the shortest time of each is compared: other work on a machine
only ever adds. The median ratio within a round stands beside it. Exit status 1 if a target is missed. ``--quick`` is a
small part of the size and two rounds: for seeing that it runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tonnage.api import PlanRequest, open_checkpoint, plan_checkpoint
from tonnage.checkpoint.config import parse_config
from tonnage.prepare.request import PrepareOptions, prepare_placement
from tonnage.prepare.run import run_preparation
from tonnage.report.documents import plan_document
from tonnage.synth.io import RehearsalOptions, write_rehearsal

LEAST_OF_HASH = 0.9
LEAST_OF_STOCK = 1.0
ROOM_BYTES = 64 << 20
"""A job ends before the tensor that would exceed it."""
TONNAGE = Path(sys.executable).with_name("tonnage")
HASH = """
import hashlib, mmap, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from blake3 import blake3

way, name, *files = sys.argv[1:]
cores = len(os.sched_getaffinity(0))

def reads(path):
    digest = blake3() if name == "blake3" else hashlib.sha256()
    view = memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(view):
            digest.update(view[:count])
    return digest.hexdigest()

def mapped(path):
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return (blake3(view) if name == "blake3" else hashlib.sha256(view)).hexdigest()

def together(path):
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()

begin = time.perf_counter()
if way == "together":
    list(map(together, files))
else:
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map({"reads": reads, "mapped": mapped}[way], files))
print(time.perf_counter() - begin)
"""
STOCK = """
import pathlib, sys, time
from model_signing import verifying

package, key = map(pathlib.Path, sys.argv[1:])
begin = time.perf_counter()
verifying.Config().use_elliptic_key_verifier(public_key=key).verify(package, package / "model.sig")
print(time.perf_counter() - begin)
"""


class Case(NamedTuple):
    """One package."""

    files: int
    hash: str


def make_package(scratch: Path, case: Case, layers: int, key: Path, *, tp: int = 1) -> Path:
    """Prepare a sparse checkpoint of some 130 MB per layer into a package whose weights are really written."""
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": layers, "vocab_size": 32000, "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }  # fmt: skip
    source, package = scratch / "source", scratch / "package"
    write_rehearsal(parse_config(config, name="bench"), source, RehearsalOptions())
    checkpoint, request = open_checkpoint(str(source)), PlanRequest(tp=tp)
    plan = plan_checkpoint(checkpoint, request)
    assert checkpoint.headers is not None
    assert plan.placement is not None
    job_bytes = checkpoint.headers.payload_bytes // case.files + ROOM_BYTES
    preparation = prepare_placement(
        plan.placement,
        source,
        package,
        PrepareOptions(hash=case.hash, job_bytes=job_bytes, source_digests=False),  # type: ignore[arg-type]
        headers=checkpoint.headers,
        digest=checkpoint.digest,
        plan=plan_document(checkpoint, request, plan, suggestions=()),
    )
    run_preparation(preparation, lambda _: None)
    subprocess.run([TONNAGE, "export", package, "--key", key], check=True, capture_output=True)
    shutil.rmtree(source)
    return package


def write_keys(scratch: Path) -> tuple[Path, Path]:
    """Write a private and a public key."""
    private, public, key = scratch / "key.pem", scratch / "key.pub.pem", ec.generate_private_key(ec.SECP256R1())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def seconds_inside(words: list[Any]) -> float:
    """Run something that prints its seconds, or a document with them."""
    done = subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["seconds"] if done.stdout.startswith("{") else done.stdout.split()[-1])


def measure(package: Path, case: Case, public: Path, rounds: int) -> bool:
    """Print speeds and ratios of every way, and say whether the targets are met."""
    weights = sorted(package.rglob("*.safetensors"))
    payload = sum(path.stat().st_size for path in weights)
    ways: dict[str, list[Any]] = {"tonnage verify": [TONNAGE, "verify", package, "--key", public, "--json"]}
    for way in ("reads", "mapped", "together") if case.hash == "blake3" else ("reads", "mapped"):
        ways[f"hash, {way}"] = [sys.executable, "-c", HASH, way, case.hash, *weights]
    ways["model_signing"] = [sys.executable, "-c", STOCK, package, public]
    runs: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        order = list(ways)
        for way in order[number % len(order) :] + order[: number % len(order)]:
            taken = seconds_inside(ways[way])
            if number:  # the first round fills the page cache
                runs[way].append(taken)
    best = {way: min(taken) for way, taken in runs.items()}
    print(f"{case.hash}, {len(weights)} files, {payload / 1e9:.2f} GB, shortest of {rounds} rounds")
    for way, shortest in best.items():
        ratios = [own / other for own, other in zip(runs[way], runs["tonnage verify"], strict=True)]
        print(
            f"  {way:<16} {payload / 1e9 / shortest:6.2f} GB/s   verify is {shortest / best['tonnage verify']:5.2f} x"
            f"   (median within a round {statistics.median(ratios):5.2f} x)"
        )
    of_hash = min(shortest for way, shortest in best.items() if way.startswith("hash")) / best["tonnage verify"]
    of_stock = best["model_signing"] / best["tonnage verify"]
    met = of_hash >= LEAST_OF_HASH and of_stock >= LEAST_OF_STOCK
    targets = f"targets {LEAST_OF_HASH} and {LEAST_OF_STOCK}: {'met' if met else 'MISSED'}"
    print(f"  {of_hash:.2f} of the fastest hash, {of_stock:.2f} of model_signing; {targets}", flush=True)
    return met


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small part of the size, two rounds")
    parser.add_argument("--directory", type=Path, help="for the packages; the system's temporary one by default")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    layers, rounds = (2, 2) if options.quick else (31, options.rounds)
    met = []
    for case in (Case(8, "blake3"), Case(1, "blake3"), Case(8, "sha256"), Case(1, "sha256")):
        with tempfile.TemporaryDirectory(dir=options.directory) as name:
            scratch = Path(name)
            private, public = write_keys(scratch)
            begin = time.perf_counter()
            package = make_package(scratch, case, layers, private)
            print(f"made in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
            met.append(measure(package, case, public, rounds))
    return 0 if all(met) or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
