"""``tonnage demo``."""

from __future__ import annotations

import shlex
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from tonnage.cli.options import emit
from tonnage.errors import TonnageError

DOES_NOT_FIT, NOT_VERIFIED = 3, 4
_BEFORE_PERMILLE = 375
_TP = 2
_DONE = (
    "demo: done, all ten steps ended as expected: planned, refused, cut, signed, verified, measured, calibrated, and a "
    "flipped bit found. Next, a model of yours: tonnage plan DIRECTORY --engine vllm --gpu rtx-4090 --context 8192 "
    "(docs/getting-started.md goes on from there)"
)


def demo() -> None:
    """Run the whole loop on a small checkpoint, offline.

    A Kimi-K3.1-like EXL3 one, from a refused plan to a verified package.

    Example: tonnage demo
    """
    from importlib import resources

    with TemporaryDirectory(prefix="tonnage-demo-") as scratch:
        home = Path(scratch)
        config, checkpoint, package = home / "kimi-k3.1.json", home / "kimi-k3.1-small", home / "package"
        record, private, public = home / "measured.json", home / "key.pem", home / "key.pub"
        config.write_bytes((resources.files("tonnage.synth") / "kimi_k31.json").read_bytes())

        def step(title: str, *words: object, expected: int = 0) -> None:
            _step(title, [str(word) for word in words], scratch, expected)

        step("A rehearsal of the 2-bit checkpoint: small, random weights", "synth", config, "-o", checkpoint,
             "--experts", "exl3-v1", "--scale-down")  # fmt: skip
        supply = _tight_supply(checkpoint)
        plan = ("plan", checkpoint, "--tp", _TP, "--estimator", "credit", "--supply", supply)
        step("Will a package fit, crediting its conversion with 37.5 %, as before anything was measured?",
             *plan, "--credit-permille", _BEFORE_PERMILLE, expected=DOES_NOT_FIT)  # fmt: skip
        step("Convert and cut, one directory per rank: planned == written", "prepare", checkpoint, "--tp", _TP,
             "--convert", "mxfp8", "-o", package)  # fmt: skip
        _make_keys(private, public)
        step("Make it a package and sign it; no weight is read again", "export", package, "--key", private)
        step("Anyone can verify it, offline", "verify", package, "--key", public)
        step("Measure what the ranks really hold", "measure", package, "-o", record)
        kept = home / ".tonnage" / "calibrations" / "demo.json"
        step("Turn the measurement into a calibration", "calibrate", checkpoint, "--measured", record,
             "-o", kept, "--name", "demo")  # fmt: skip
        step("Does the calibration hold?", "calibrations", "check", kept)
        step("The same plan, with the credit that was measured: it fits", *plan, "--calibration", kept)
        _flip_a_bit(package / "weights" / f"tp{_TP}" / "rank-1" / "model-00001-of-00001.safetensors")
        step("One bit of one rank flips: it is found and named", "verify", package, "--key", public,
             expected=NOT_VERIFIED)  # fmt: skip
    emit(f"\n{_DONE}")


def _tight_supply(checkpoint: Path) -> str:
    """Return a supply between what the credit of old estimates and what the ranks will hold."""
    from tonnage.api import PlanRequest, open_checkpoint, plan_checkpoint
    from tonnage.units import MIB

    opened = open_checkpoint(checkpoint)
    plans = (
        plan_checkpoint(opened, PlanRequest(tp=_TP, estimator="credit", credit_permille=_BEFORE_PERMILLE)),
        plan_checkpoint(opened, PlanRequest(tp=_TP, convert="mxfp8")),
    )
    return f"{sum(plan.ranks[plan.binding_rank].fixed_bytes for plan in plans) // (2 * MIB)}MiB"


def _make_keys(private: Path, public: Path) -> None:
    """Write a new pair of signing keys, as `openssl ecparam` would."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = ec.generate_private_key(ec.SECP256R1())
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def _flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))


_steps = count(1)


def _step(title: str, words: list[str], scratch: str, expected: int) -> None:
    """Print a command, run it in this process, and stop the demo if it does not end as it should."""
    from tonnage.cli import app, status_of

    emit(f"\n{next(_steps)}. {title}\n$ tonnage {shlex.join(words).replace(f'{scratch}/', '')}")
    try:
        status = app(words, standalone_mode=False) or 0
    except TonnageError as error:
        emit(str(error).replace(f"{scratch}/", ""))
        status = status_of(error)
    emit(f"(exit code {status}, as expected)" if status == expected else f"(exit code {status})")
    if status != expected:
        emit(f"demo: expected exit code {expected}")
        raise typer.Exit(1)
