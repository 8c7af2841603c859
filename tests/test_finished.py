"""A package exported once more: nothing is signed that its signature does not state, and it verifies at any moment."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from packages import OPTIONS, RANK, prepared_place, sign_anew
from samples import file_contents, flip_last
from tonnage.errors import TonnageError
from tonnage.export.io import export_package
from tonnage.export.manifest import Manifest, manifest_bytes, parse_manifest
from tonnage.export.sign import Key, Signer, load_signer
from tonnage.export.signature import PublicKey
from tonnage.export.verify import verify_package


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``prepared`` checkpoint, a ``package`` made of it with ``key``, and another key; not to be changed."""
    folder = prepared_place(tmp_path_factory.mktemp("finished"))
    shutil.copytree(folder / "prepared", folder / "package")
    export_package(folder / "package", load_signer(Key(path=folder / "key.pem")), OPTIONS)
    return folder


@pytest.fixture(scope="module")
def other(place: Path) -> Signer:
    return load_signer(Key(path=place / "other.pem"))


@pytest.fixture
def package(place: Path, tmp_path: Path) -> Path:
    """A finished package to be changed."""
    return shutil.copytree(place / "package", tmp_path / "package")


def refused(directory: Path, signer: Signer, into: Path | None = None) -> str:
    """Sign in vain; nothing is changed by it, in the directory or beside it."""
    before = file_contents(directory.parent)
    with pytest.raises(TonnageError) as caught:
        export_package(directory, signer, OPTIONS, into=into)
    assert file_contents(directory.parent) == before
    return str(caught.value)


def relist(directory: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Write another manifest, canonical and unsigned."""
    path = directory / "manifest.json"
    path.write_bytes(manifest_bytes(change(parse_manifest(path.read_bytes()))))


def digest_changed(manifest: Manifest) -> Manifest:
    files = (replace(file, sha256="0" * 64) if file.path == RANK else file for file in manifest.files)
    return replace(manifest, files=tuple(files))


def payload_changed(manifest: Manifest) -> Manifest:
    files = (
        replace(file, payload_bytes=file.payload_bytes - 8) if file.path == RANK else file for file in manifest.files
    )
    return replace(manifest, files=tuple(files))


def config_left_out(manifest: Manifest) -> Manifest:
    return replace(manifest, files=tuple(file for file in manifest.files if file.path != "config.json"))


# --- what is signed again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [digest_changed, payload_changed])
def test_a_manifest_that_the_signature_does_not_state_is_not_signed(
    package: Path, other: Signer, change: Callable[[Manifest], Manifest]
) -> None:
    relist(package, change)
    assert "manifest.json: not the file that model.sig states" in refused(package, other)


def test_a_manifest_without_a_file_that_was_signed_is_not_signed(package: Path, other: Signer) -> None:
    relist(package, config_left_out)
    (package / "config.json").unlink()
    assert "manifest.json: not the file that model.sig states" in refused(package, other)


def test_headers_are_held_against_a_manifest_that_somebody_signed(place: Path, package: Path, other: Signer) -> None:
    sign_anew(package, place / "key.pem", payload_changed)
    assert f"{RANK}: header and manifest" in refused(package, other)


def test_a_signature_of_other_files_is_no_witness(package: Path, place: Path, other: Signer) -> None:
    shutil.copytree(package, package.with_name("twin"))
    sign_anew(package.with_name("twin"), place / "key.pem", config_left_out)
    shutil.copy(package.with_name("twin") / "model.sig", package)
    assert "manifest.json: not the file that model.sig states" in refused(package, other)
    (package / "model.sig").write_bytes(b"{}")
    assert "model.sig: not a signature of a model" in refused(package, other)


def test_without_a_signature_every_file_is_read_before_it_is_signed(place: Path, package: Path, other: Signer) -> None:
    (package / "model.sig").unlink()
    listed = parse_manifest((package / "manifest.json").read_bytes()).files
    told: list[int] = []
    done = export_package(package, other, OPTIONS, on_progress=lambda standing: told.append(standing.done_bytes))
    assert done.changed
    assert done.reread_bytes == sum(file.nbytes for file in listed) == max(told)
    assert verify_package(package, PublicKey(path=place / "other.pub.pem")).verified


def test_without_a_signature_a_file_of_other_bytes_is_not_signed(package: Path, other: Signer) -> None:
    (package / "model.sig").unlink()
    flip_last(package / RANK)
    assert f"{RANK}: not as it was written" in refused(package, other)


def test_without_a_signature_both_digests_of_a_file_are_checked(package: Path, other: Signer) -> None:
    (package / "model.sig").unlink()
    relist(package, digest_changed)
    assert f"{RANK}: not as it was written; expected sha256 {'0' * 64}" in refused(package, other)


# --- while it is signed again -----------------------------------------------------------------------------------------

MOMENTS = """
import os, shutil, signal, sys
from pathlib import Path
from tonnage.export.io import export_package
from tonnage.export.package import Options
from tonnage.export.sign import Key, load_signer

package, key, work = map(Path, sys.argv[1:])
signer, options = load_signer(Key(path=key)), Options(today="2026-11-30")
WRITES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link"}

def contents(folder):
    return {str(p.relative_to(folder)): p.is_file() and p.read_bytes() for p in folder.rglob("*")}

def export(directory, moments):
    child = os.fork()
    if not child:
        left = [moments]
        def hook(event, args):
            if event in WRITES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        export_package(directory, signer, options)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

before = contents(package)
shutil.copytree(package, work / "whole")
export_package(work / "whole", signer, options)  # all modules are loaded then
after = contents(work / "whole")
assert export(work / "whole", 0) == 0  # what is signed so already is not written to
for moments in range(100):
    status = export(package, moments)
    assert contents(package) == after or status != 0 and contents(package) == before, moments
    if status == 0:
        break
print(moments)
"""


def run(*words: object) -> str:
    done = subprocess.run([sys.executable, "-c", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_anywhere_it_is_a_package_with_the_one_signature_or_the_other(
    place: Path, package: Path, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    moments = int(run(MOMENTS, package, place / "other.pem", tmp_path / "work"))
    assert moments >= 2
    assert verify_package(package, PublicKey(path=place / "other.pub.pem")).verified


LIMITED = """
import resource, sys
from pathlib import Path
from tonnage.errors import TonnageError
from tonnage.export.io import export_package
from tonnage.export.package import Options
from tonnage.export.sign import Key, load_signer

signer = load_signer(Key(path=Path(sys.argv[2])))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    export_package(Path(sys.argv[1]), signer, Options(today="2026-11-30"))
except TonnageError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["prepared", "package"])
def test_a_process_that_may_not_write_leaves_nothing_behind(place: Path, tmp_path: Path, name: str) -> None:
    directory = shutil.copytree(place / name, tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    assert "file too large for the limit of this process" in run(LIMITED, directory, place / "other.pem")
    assert sorted(tmp_path.rglob("*")) == before


def test_two_exports_are_never_at_work_at_once(package: Path, other: Signer) -> None:
    descriptor = os.open(package, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert "another export, fetch or join is at work here" in refused(package, other)
    finally:
        os.close(descriptor)
    assert export_package(package, other, OPTIONS).changed


def test_a_package_that_cannot_have_a_file_beside_it_is_not_signed_again(
    package: Path, other: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: Path(path) != package.parent and mode == os.W_OK)
        assert "by way of a file beside it" in refused(package, other)


# --- where it goes ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["package", "prepared", "begun"])
def home(request: pytest.FixtureRequest, place: Path, tmp_path: Path) -> Path:
    """A package, a preparation, or one that was begun."""
    if request.param == "begun":
        (tmp_path / "begun" / ".prepare").mkdir(parents=True)
        (tmp_path / "begun" / "weights").mkdir()
    else:
        shutil.copytree(place / request.param, tmp_path / request.param)
    return tmp_path / request.param


def test_nothing_is_moved_into_a_package_or_a_preparation(home: Path, place: Path, other: Signer) -> None:
    moving = shutil.copytree(place / "package", home.parent / "moving")
    for into in (home, home / "weights"):
        assert f"{into}: inside a package or a preparation; expected another directory; found {home}" in refused(
            moving, other, into
        )


def test_a_package_is_moved_from_inside_it(
    tonnage: Callable[..., subprocess.CompletedProcess[str]], place: Path, package: Path
) -> None:
    (package.parent / "into").mkdir()
    done = tonnage("export", ".", "--key", place / "key.pem", "--into", "../into", cwd=package)
    assert (done.returncode, done.stderr) == (0, f"moved to {package.parent}/into/llama-tp2-20261130\n")
    assert not package.exists()
    assert (package.parent / "into" / "llama-tp2-20261130" / "model.sig").is_file()
