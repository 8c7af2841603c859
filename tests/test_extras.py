"""What the command says where extras are not installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from samples import certify, prepare_small, write_key
from tonnage.cli import _OF_EXTRAS
from tonnage.export.io import export_package
from tonnage.export.keys import load_private_key
from tonnage.export.package import Options
from tonnage.export.sign import Key, load_signer

SOURCES = Path(__file__).parent.parent / "src" / "tonnage"
WITHOUT = "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split())); from tonnage.cli import main; main()"
EXTRAS = "blake3 cryptography model_signing numba numpy OpenSSL rfc8785"
PREPARE = ("prepare", "small", "--tp", "2", "-o", "out")
EXPORT = ("export", "prepared", "--key", "key.pem")
VERIFY = ("verify", "signed", "--key", "key.pub.pem")
CASES = {
    "prepare, none": (EXTRAS, PREPARE, "blake3"),
    "prepare, no numpy": ("numpy", PREPARE, "numpy"),
    "prepare, no numba": ("numba", PREPARE, "numba"),
    "export, none": (EXTRAS, EXPORT, "cryptography"),
    "export, no blake3": ("blake3", EXPORT, "blake3"),
    "export, no model_signing": ("model_signing", EXPORT, "model_signing"),
    "export, no rfc8785": ("rfc8785", EXPORT, "rfc8785"),
    "verify, none": (EXTRAS, VERIFY, "cryptography"),
    "verify, no blake3": ("blake3", VERIFY, "blake3"),
    "verify, no OpenSSL": ("OpenSSL", ("verify", "signed", "--certificate-chain", "root.crt"), "OpenSSL"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint ``small``, ``prepared`` from it and ``signed`` with ``key.pem``; ``root.crt`` is of that key."""
    folder = tmp_path_factory.mktemp("extras")
    key, _ = write_key(folder)
    for name in ("prepared", "signed"):
        prepare_small(folder / "small", folder / name)
    export_package(folder / "signed", load_signer(Key(path=key)), Options(today="2026-11-30"))
    loaded = load_private_key(key, None)
    certificate = certify("root", loaded, "root", loaded, authority=True)
    (folder / "root.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return folder


def run_without(modules: str, words: tuple[str, ...], place: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, modules, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=place, check=False)


def files(place: Path) -> set[Path]:
    return set(place.rglob("*"))


@pytest.mark.parametrize(("modules", "words", "named"), CASES.values(), ids=CASES)
def test_a_missing_extra_is_one_line(modules: str, words: tuple[str, ...], named: str, place: Path) -> None:
    before = files(place)
    done = run_without(modules, words, place)
    line = f"tonnage: {named} is not installed; it comes with `pip install 'tonnage[prepare,sign]'`\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    assert files(place) == before


UI = ("ui", ".", "--port", "0", "--no-browser")


@pytest.mark.parametrize(
    ("named", "extra"), [("starlette", "ui"), ("uvicorn", "ui"), ("plotly", "ui"), ("jinja2", "html")]
)
def test_a_page_without_its_extra_is_one_line_before_anything_is_served(named: str, extra: str, place: Path) -> None:
    done = run_without(named, UI, place)
    line = f"tonnage: {named} is not installed; it comes with `pip install 'tonnage[{extra}]'`\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_planning_needs_no_extra(place: Path) -> None:
    done = run_without(f"{EXTRAS} jinja2 plotly starlette uvicorn", ("plan", "small", "--tp", "2"), place)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("modules", "address", "line"),
    [
        (
            "huggingface_hub",
            "hf:org/name",
            "huggingface_hub is not installed; it comes with `pip install 'tonnage[hub]'`",
        ),
        ("httpx2", "hf:org/name", "httpx2 is not installed; it comes with `pip install 'tonnage[hub]'`"),
        ("obstore", "s3://bucket/m", "obstore is not installed; it comes with `pip install 'tonnage[store]'`"),
    ],
)
def test_an_address_names_the_extra_it_needs(modules: str, address: str, line: str, place: Path) -> None:
    done = run_without(modules, ("plan", address), place)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"tonnage: {line}\n")


def test_every_library_that_is_imported_anywhere_has_its_extra() -> None:
    """Those of planning are always there; torch and vllm belong to whoever runs an engine."""
    trees = [ast.parse(path.read_text()) for path in SOURCES.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    libraries = {name.partition(".")[0] for name in named} - sys.stdlib_module_names
    assert libraries - {"msgspec", "rich", "tonnage", "torch", "typer", "vllm"} <= set(_OF_EXTRAS)
    assert len(libraries) > 15


def test_any_other_missing_module_is_a_bug(place: Path) -> None:
    done = run_without("tonnage.export.naming", EXPORT, place)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback ")


def test_refusals_need_no_extra(place: Path) -> None:
    done = run_without(EXTRAS, ("plan", "absent"), place)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("tonnage: absent: ")
