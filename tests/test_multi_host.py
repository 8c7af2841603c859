"""Packages of some ranks each: made, verified, joined, measured, and loaded where the other ranks are elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packages import run, sign_anew
from samples import LLAMA, file_contents, rehearse, write_key
from tonnage.calibrate import Fitting, calibrate
from tonnage.credit import CreditInputs
from tonnage.errors import CreditError
from tonnage.export.joining import join_parts
from tonnage.export.manifest import Manifest, PackageError, parse_manifest
from tonnage.export.parts import read_part, write_documents
from tonnage.export.signature import PublicKey
from tonnage.export.verify import VerifyError, VerifyRequest, verify_package
from tonnage.measure.io import measure_packages, read_measurement_file
from tonnage.measure.packages import measurement_document
from tonnage.measure.record import MeasurementError, read_measurement
from tonnage.prepare.documents import MANIFEST, PLAN, PROVENANCE, SIGNATURE
from tonnage.topology import Topology
from tonnage.vllm_plugin.opening import LoadError, open_rank_files

PAGE = Path(__file__).resolve().parent.parent / "docs" / "multi-host.md"
DOCUMENTS = (MANIFEST, PLAN, PROVENANCE, SIGNATURE)
SMALL = {**LLAMA, "num_key_value_heads": 4}
HOSTS = {"a": (0, 1), "b": (2, 3)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint ``source``; keys ``hosts`` and ``release``; ``plain`` and ``mxfp8`` in parts ``a`` and ``b``, and ``whole``."""
    folder = tmp_path_factory.mktemp("hosts")
    write_key(folder, "hosts")
    write_key(folder, "release")
    rehearse(folder / "source", SMALL)
    for kind, words in {"plain": (), "mxfp8": ("--convert", "mxfp8")}.items():
        for host, ranks in {**{one: ("--ranks", f"{r[0]}-{r[-1]}") for one, r in HOSTS.items()}, "whole": ()}.items():
            package = folder / kind / host
            run("prepare", folder / "source", "--tp", 4, "-o", package, "--workers", 1, *words, *ranks)
            key = folder / ("release.pem" if host == "whole" else "hosts.pem")
            run("export", package, "--key", key, "--date", "2026-01-31", "--profile", "c4-p64")
    return folder


def join(place: Path, kind: str, output: Path) -> Path:
    parts = (place / kind / host for host in HOSTS)
    keys = ("--part-key", place / "hosts.pub.pem", "--key", place / "release.pem")
    run("join", *parts, *keys, "-o", output)
    return output


@pytest.fixture
def hosts(place: Path, tmp_path: Path) -> Callable[[str], dict[str, Path]]:
    """Make what each host has after joining: the documents of all ranks, the weights of its own."""

    def made(kind: str = "plain") -> dict[str, Path]:
        joint = join(place, kind, tmp_path / "joint")
        found = {}
        for host in HOSTS:
            found[host] = Path(shutil.copytree(place / kind / host, tmp_path / host))
            shutil.copytree(joint, found[host], dirs_exist_ok=True)
        return found

    return made


def trust(place: Path, name: str = "release") -> PublicKey:
    return PublicKey(path=place / f"{name}.pub.pem")


def weights(manifest: Manifest) -> list[Any]:
    return [file for file in manifest.files if file.path != PROVENANCE]


# --- joining ----------------------------------------------------------------------------------------------------------


def test_parts_joined_are_what_one_host_exports_of_all_ranks(place: Path, tmp_path: Path) -> None:
    joint = file_contents(join(place, "plain", tmp_path / "joint"))
    assert joint == {name: (place / "plain" / "whole" / name).read_bytes() for name in DOCUMENTS}


def test_converted_parts_differ_from_it_in_their_figures_alone(place: Path, tmp_path: Path) -> None:
    """Rows of a tensor cut by rows were converted on different hosts, columns on both."""
    joint, whole = join(place, "mxfp8", tmp_path / "joint"), place / "mxfp8" / "whole"
    manifests = [parse_manifest((one / MANIFEST).read_bytes()) for one in (joint, whole)]
    assert weights(manifests[0]) == weights(manifests[1])
    assert manifests[0].ranks == manifests[1].ranks == (0, 1, 2, 3)
    here, there = (json.loads((one / PROVENANCE).read_bytes()) for one in (joint, whole))
    parts, tensors = here.pop("numerics")["converted"], there.pop("numerics")["converted"]
    assert here == there
    for tensor in tensors:
        own = [part for part in parts if part["tensor"] == tensor["tensor"]]
        by_rows = not tensor["tensor"].endswith(("o_proj.weight", "down_proj.weight"))
        assert len(own) == 1 + by_rows
        assert sum(part["elements"] for part in own) == tensor["elements"]
        assert max(part["largest_error"] for part in own) == tensor["largest_error"]


def test_ranks_moved_together_are_one_whole_package(place: Path, hosts: Any) -> None:
    found = hosts("mxfp8")
    for path in (found["b"] / "weights" / "tp4").iterdir():
        path.rename(found["a"] / "weights" / "tp4" / path.name)
    checked = verify_package(found["a"], trust(place))
    assert checked.problems == ()
    assert not checked.in_part
    assert checked.unchecked == ()
    assert checked.ranks == (0, 1, 2, 3)


def test_joining_again_writes_nothing_and_another_directory_is_left_alone(place: Path, tmp_path: Path) -> None:
    joint = join(place, "plain", tmp_path / "joint")
    before = {path: path.stat().st_mtime_ns for path in joint.iterdir()}
    join(place, "plain", joint)
    assert {path: path.stat().st_mtime_ns for path in joint.iterdir()} == before
    (joint / "notes.txt").touch()
    package = join_parts([read_part(place / "plain" / host, [trust(place, "hosts")]) for host in HOSTS])
    with pytest.raises(PackageError, match=r"output is in use; .*; found notes\.txt"):
        write_documents(joint, package, b"")


def test_of_a_part_nothing_but_its_documents_is_read(place: Path, tmp_path: Path) -> None:
    copies = []
    for host in HOSTS:
        (tmp_path / host).mkdir()
        for name in DOCUMENTS:
            shutil.copy(place / "plain" / host / name, tmp_path / host)
        copies.append(read_part(tmp_path / host, [trust(place), trust(place, "hosts")]))
    package = join_parts(copies)
    assert package.documents[MANIFEST] == (place / "plain" / "whole" / MANIFEST).read_bytes()


def test_a_part_alone_keeps_its_ranks_and_gets_another_name(place: Path) -> None:
    package = join_parts([read_part(place / "plain" / "b", [trust(place, "hosts")])], name="half")
    assert package.manifest.name == "half"
    assert package.manifest.ranks == (2, 3)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"name": "other"}, r"another name; --name gives all of them one; expected .*; found other"),
        ({"tonnage_version": "0.0.0"}, r"another tonnage_version; .*; found 0\.0\.0"),
    ],
)
def test_parts_of_other_packages_are_refused(place: Path, tmp_path: Path, change: dict[str, str], refusal: str) -> None:
    other = Path(shutil.copytree(place / "plain" / "b", tmp_path / "other"))
    sign_anew(other, place / "hosts.pem", lambda manifest: replace(manifest, **change))
    parts = [read_part(one, [trust(place, "hosts")]) for one in (place / "plain" / "a", other)]
    with pytest.raises(PackageError, match=refusal):
        join_parts(parts)


def test_parts_of_another_conversion_are_refused_with_all_that_differs(place: Path) -> None:
    parts = [read_part(place / kind / "a", [trust(place, "hosts")]) for kind in ("plain", "mxfp8")]
    with pytest.raises(PackageError) as refused:
        join_parts(parts)
    named = " ".join(problem.what for problem in refused.value.problems)
    for what in ("plan.json", "options in provenance.json", "schedule in provenance.json"):
        assert f"another {what}" in named


def test_a_file_of_all_ranks_that_differs_is_refused(place: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(place / "plain" / "b", tmp_path / "other"))
    config = other / "config.json"
    config.write_bytes(config.read_bytes() + b"\n")
    sign_anew(other, place / "hosts.pem", only="config.json")
    parts = [read_part(one, [trust(place, "hosts")]) for one in (place / "plain" / "a", other)]
    with pytest.raises(PackageError, match=r"config\.json: not the file another part has"):
        join_parts(parts)


def test_a_part_somebody_else_signed_or_changed_is_refused(place: Path, tmp_path: Path) -> None:
    part = place / "plain" / "a"
    with pytest.raises(VerifyError, match=rf"{re.escape(str(part))}/model\.sig"):
        read_part(part, [trust(place)])
    changed = Path(shutil.copytree(part, tmp_path / "changed"))
    (changed / PROVENANCE).write_bytes(b"{}")
    with pytest.raises(VerifyError, match=r"provenance\.json: contents are not those signed"):
        read_part(changed, [trust(place, "hosts")])


# --- one host ---------------------------------------------------------------------------------------------------------


def test_a_host_verifies_its_ranks_and_is_told_of_the_others(place: Path, hosts: Any) -> None:
    directory = hosts()["b"]
    checked = verify_package(directory, trust(place), VerifyRequest(ranks=(2, 3)))
    assert (checked.problems, checked.in_part, checked.absent) == ((), True, ())
    assert "ranks not looked at: 0, 1" in checked.unchecked
    whole = verify_package(directory, trust(place))
    assert whole.absent == (0, 1)
    assert {problem.where.rpartition("/")[0] for problem in whole.problems} == {
        "weights/tp4/rank-0",
        "weights/tp4/rank-1",
    }
    with pytest.raises(VerifyError, match=r"ranks 0-1: not here at all; expected --ranks 2-3 verifies those that are"):
        whole.check()


def test_a_host_is_refused_what_is_not_its_own(place: Path, hosts: Any) -> None:
    directory = hosts()["b"]
    (directory / "weights" / "tp4" / "rank-4").mkdir()
    flipped = next((directory / "weights" / "tp4" / "rank-3").glob("*.safetensors"))
    raw = bytearray(flipped.read_bytes())
    raw[-1] ^= 1
    flipped.write_bytes(raw)
    checked = verify_package(directory, trust(place), VerifyRequest(ranks=(2, 3)))
    assert [problem.where for problem in checked.problems] == [
        "weights/tp4/rank-4",
        flipped.relative_to(directory).as_posix(),
    ]


def test_an_engine_loads_its_rank_where_others_are_elsewhere(place: Path, hosts: Any) -> None:
    directory, key = hosts()["b"], place / "release.pub.pem"
    for rank in (2, 3):
        files = open_rank_files(directory, Topology(tp=4), rank, public_key=key)
        assert files.verified
        assert files.view.payload_bytes == files.planned_bytes
    with pytest.raises(LoadError, match=r"rank is missing; expected weights/tp4/rank-0; found rank-2, rank-3"):
        open_rank_files(directory, Topology(tp=4), 0, public_key=key)


def test_a_preparation_of_some_ranks_is_complete_when_asked_again(place: Path, tmp_path: Path) -> None:
    """Rows that none of the ranks takes are not converted, and not missed either."""
    words = ("prepare", place / "source", "--tp", 4, "-o", tmp_path / "out", "--convert", "mxfp8", "--ranks", 1)
    run(*words)
    before = file_contents(tmp_path / "out")
    run(*words)
    assert file_contents(tmp_path / "out") == before


# --- measured in parts ------------------------------------------------------------------------------------------------


def measured(*packages: Path) -> dict[str, Any]:
    return measurement_document(measure_packages(packages), date="2026-01-31")


@pytest.mark.parametrize("joined", [False, True], ids=["packages of their own", "one package"])
def test_packages_of_some_ranks_measured_together_are_the_whole(place: Path, hosts: Any, joined: bool) -> None:
    parts = list((hosts() if joined else {host: place / "plain" / host for host in HOSTS}).values())
    whole, together = measured(place / "plain" / "whole"), measured(*parts)
    assert together["ranks"] == whole["ranks"]
    assert (together["absent_ranks"], together["identical"]) == ([], True)
    record = read_measurement(json.dumps(together).encode(), "together")
    assert record.is_complete
    assert record.packages == (1 if joined else 2)
    alone = measured(parts[0])
    assert alone["ranks"] == whole["ranks"][:2]
    assert alone["absent_ranks"] == [2, 3]
    assert alone["packages"][0]["notes"] == (f"{parts[0].name}: ranks 2-3 are not here and not measured",)


def test_a_rank_in_several_packages_is_held_against_the_first(place: Path) -> None:
    both = measured(place / "mxfp8" / "b", place / "mxfp8" / "a", place / "plain" / "b")
    assert not both["identical"]
    assert {(one["package"], one["rank"]) for one in both["differences"]} == {("b", 2), ("b", 3)}


def test_a_record_must_say_which_ranks_it_lacks(place: Path) -> None:
    document = measured(place / "plain" / "a")
    for absent, refusal in (
        ([], r"ranks; expected 4; found 2; missing 2, 3"),
        ([2], r"ranks; expected 4; found 3; missing 3"),
        ([1, 2, 3], r"rank 1; expected measured or absent; found both"),
        ([2, 3, 4], r"rank; expected less than 4; found 4"),
    ):
        with pytest.raises(MeasurementError, match=refusal):
            read_measurement(json.dumps({**document, "absent_ranks": absent}).encode(), "record")


def test_credits_take_the_records_of_hosts_as_evidence_of_one_package(hosts: Any, tmp_path: Path) -> None:
    records = {}
    for host, directory in hosts().items():
        (tmp_path / f"{host}.json").write_text(json.dumps(measured(directory)))
        records[host] = read_measurement_file(tmp_path / f"{host}.json")
    device_bytes = 8 * records["a"].largest_bytes
    fitting = Fitting(
        name="small",
        family="llama",
        digest=None,
        stored_bytes=device_bytes,
        inputs=CreditInputs(device_bytes=device_bytes, tp_size=4, counted_bf16_bytes=device_bytes, latent_pair_bytes=0),
        draft_bytes=0,
        step_permille=5,
        date="2026-01-31",
    )
    both = calibrate(fitting, list(records.values()))
    assert [tuple(rank.rank for rank in one.ranks) for one in both.evidence] == [(0, 1), (2, 3)]
    assert not [text for text in both.not_measured if text.startswith("ranks ")]
    assert "ranks 2-3" in calibrate(fitting, [records["a"]]).not_measured
    with pytest.raises(CreditError, match="a package is measured twice"):
        calibrate(fitting, [*records.values(), records["a"]])


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_commands_of_the_page(place: Path, tmp_path: Path) -> None:
    """Blocks are run as they stand, on two hosts that are directories, for 2 x 2 ranks in place of 2 x 8."""
    blocks = re.findall(r"```sh\n# host-([ab])\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [host for host, _ in blocks] == ["a", "b", "a", "b"]
    for host in HOSTS:
        (tmp_path / host / "models").mkdir(parents=True)
        (tmp_path / host / "models" / "Kimi-K3").symlink_to(place / "source")
        for name in ("hosts", "release"):
            for suffix in ("pem", "pub.pem"):
                shutil.copy(place / f"{name}.{suffix}", tmp_path / host)
    command = Path(sys.executable).with_name("tonnage")
    before = f'set -e; tonnage() {{ {command} "$@"; }}; scp() {{ cp "${{@//host-b:/..\\/b\\/}}"; }}\n'
    said = ""
    for host, block in blocks:
        small = block.replace("--tp 16", "--tp 4").replace("0-7", "0-1").replace("8-15", "2-3")
        done = subprocess.run(
            ["bash", "-c", before + small], cwd=tmp_path / host, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        said += done.stdout
    assert "not checked: ranks not in this package: 2, 3" in said
    assert "verified in part" in said
    assert "the plan is equal to what was measured, to the byte" in said
    for host, ranks in HOSTS.items():
        package = tmp_path / host / "packages" / "k3"
        assert verify_package(package, trust(place), VerifyRequest(ranks=ranks)).problems == ()
