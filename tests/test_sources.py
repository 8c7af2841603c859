"""What sources are made of: addresses, the shelf of what was fetched, waiting in order, heads of answers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from samples import PATIENCE, write_shards
from tonnage.errors import CheckpointError, SourceError
from tonnage.sources import parallel
from tonnage.sources import shelf as shelves
from tonnage.sources.addresses import is_remote, open_source, split_file
from tonnage.sources.answers import Asked, read_head, retry_after
from tonnage.sources.connections import Connection, Origin
from tonnage.sources.limits import Limits
from tonnage.sources.local import LocalSource
from tonnage.sources.model import FileFacts
from tonnage.sources.parallel import GrowthLimit, in_order, waited
from tonnage.sources.shelf import Listing, Shelf

FACTS = FileFacts(name="a", nbytes=100, version="etag 1")


def test_what_leads_off_this_machine() -> None:
    assert all(map(is_remote, ("hf:a/b", "HF:a/b", "https://x", "http://x", "s3://x", "gs://x")))
    assert not any(map(is_remote, ("./hf:a", "model", "/hf:", "config.json", "", Path("hf:a"))))


def test_paths_are_local_and_not_looked_at(tmp_path: Path) -> None:
    source = open_source(tmp_path / "nothing")
    assert isinstance(source, LocalSource)
    assert (source.parallel, source.transfer, source.address) == (1, None, str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match="cannot list the checkpoint directory"):
        source.names()


@pytest.mark.parametrize("address", ["s3:bucket", "s3://", "s3://b/../c", "gs://bucket/a//b", "s3://bucket/x?y"])
def test_what_is_no_address_of_objects_is_refused(address: str) -> None:
    with pytest.raises(SourceError, match="not an address of objects"):
        open_source(address)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("https://h/m/config.json", ("https://h/m", "config.json")),
        ("https://h/m.json/", ("https://h/m.json/", None)),
        ("s3://b/m/other.json", ("s3://b/m", "other.json")),
        ("hf:org/name.json", ("hf:org/name.json", None)),
    ],
)
def test_a_file_is_told_from_a_directory(text: str, parts: tuple[str, str | None]) -> None:
    assert split_file(text) == parts


# ---- this machine ----------------------------------------------------------------------------------------------------


def test_files_of_a_directory_with_their_facts(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    source = LocalSource(tmp_path)
    assert source.names() == ("a", "dangling", "folder", "link")
    version = f"mtime {(tmp_path / 'a').stat().st_mtime_ns} ns"
    assert source.list_files() == {name: FileFacts(name=name, nbytes=3, version=version) for name in ("a", "link")}
    assert [source.has(name) for name in ("a", "dangling", "folder", "b")] == [True, True, True, False]


def test_an_open_file_says_when_it_changed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abcdef")
    view = bytearray(3)
    with LocalSource(tmp_path).opened("a", sequential=True) as file:
        file.read_into(memoryview(view), 2)
        assert (bytes(view), file.read(2, 4), file.at_hand(6, 0)) == (b"cde", b"ef", True)
        assert file.current_facts() == file.facts
        os.truncate(tmp_path / "a", 5)
        assert file.current_facts() != file.facts
        with pytest.raises(CheckpointError, match="a: truncated while it was read; expected 6 bytes; found 5 bytes"):
            file.read_into(memoryview(view), 3)


def test_a_snapshot_of_the_hub_has_the_name_of_its_repository(tmp_path: Path) -> None:
    directory = tmp_path / "models--org--name-7B" / "snapshots" / "0123"
    directory.mkdir(parents=True)
    assert (LocalSource(directory).name, LocalSource(tmp_path).name) == ("name-7B", tmp_path.name)


def test_planning_on_this_machine_imports_nothing_that_talks_to_servers(tmp_path: Path) -> None:
    code = "import sys; from tonnage.api import open_checkpoint; open_checkpoint(sys.argv[1]); print(*sys.modules)"
    source = write_shards(tmp_path / "m")
    done = subprocess.run([sys.executable, "-c", code, source], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "tonnage.sources.local" in loaded
    assert not {"httpx2", "huggingface_hub", "obstore", "ssl", "http.client", "socket", "queue"} & loaded
    assert not {
        name for name in loaded if name.startswith(("tonnage.sources.h", "tonnage.sources.w", "tonnage.sources.s"))
    }


# ---- the shelf -------------------------------------------------------------------------------------------------------


def test_a_shelf_gives_back_what_was_put(tmp_path: Path) -> None:
    one, other = Shelf("a", tmp_path), Shelf("b", tmp_path)
    one.put(FACTS, 0, b"0123456789")
    assert [one.get(FACTS, 0, nbytes) for nbytes in (10, 4, 11)] == [b"0123456789", b"0123", None]
    assert one.get(FACTS, 1, 4) is other.get(FACTS, 0, 4) is None
    changed = FileFacts(name="a", nbytes=100, version="etag 2")
    assert Shelf("a", tmp_path).get(FACTS, 0, 10) == b"0123456789"
    assert one.get(changed, 0, 4) is None


def test_a_shelf_keeps_its_listing(tmp_path: Path) -> None:
    listing = Listing(files={"a": FACTS}, folders=("weights",), revision="0123")
    assert Shelf("a", tmp_path).listing() is None
    Shelf("a", tmp_path).put_listing(listing)
    assert Shelf("a", tmp_path).listing() == listing


@pytest.mark.parametrize("raw", [b"", b"tonnage1", b"{}", bytes(200)])
def test_a_damaged_entry_is_none(tmp_path: Path, raw: bytes) -> None:
    shelf = Shelf("a", tmp_path)
    shelf.put(FACTS, 0, b"0123456789")
    shelf.put_listing(Listing(files={}))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_bytes(raw)
    assert shelf.get(FACTS, 0, 1) is shelf.listing() is None


def test_only_its_owner_reads_a_shelf(tmp_path: Path) -> None:
    Shelf("a", tmp_path / "new").put(FACTS, 0, b"x")
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()] == [0o700]


def test_the_shelf_used_longest_ago_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "MOST_BYTES", 250)
    for number, key in enumerate("abc"):
        Shelf(key, tmp_path).put(FACTS, 0, bytes(80))
        for path in tmp_path.iterdir():
            if path.stat().st_mtime > 1e9:
                os.utime(path, (number, number))
    assert [Shelf(key, tmp_path).get(FACTS, 0, 1) for key in "bc"] == [b"\0", b"\0"]
    Shelf("d", tmp_path).put(FACTS, 0, bytes(80))
    assert len(list(tmp_path.iterdir())) <= 3


@pytest.mark.parametrize("root", [None, Path("/dev/null/x")])
def test_without_a_place_a_shelf_lasts_as_long_as_the_process(root: Path | None) -> None:
    shelf = Shelf("a", root)
    shelf.put(FACTS, 0, b"x")
    assert shelf.get(FACTS, 0, 1) == b"x"
    place = shelf._directory
    assert place is not None
    assert place.is_dir()
    del shelf
    assert not place.exists()


# ---- waiting ---------------------------------------------------------------------------------------------------------


def test_results_come_in_order_and_not_too_many_ahead() -> None:
    under_way, most = [0], [0]
    lock, second = threading.Lock(), threading.Event()

    def work(item: int) -> int:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        if item == 1:
            second.set()
        assert item or second.wait(PATIENCE)
        time.sleep(0.001 * (item % 3))
        return item * item

    results = in_order(work, range(40), threads=4, weights=[10] * 40, room=35)
    for item, result in enumerate(results):
        assert result == item * item
        with lock:
            under_way[0] -= 1
    assert 1 < most[0] <= 4


def test_one_that_is_heavier_than_the_room_comes_alone() -> None:
    assert list(in_order(lambda item: item, [1, 2, 3], threads=3, weights=[100, 1, 100], room=10)) == [1, 2, 3]


def test_the_first_failure_is_raised_and_the_rest_is_dropped() -> None:
    done: list[int] = []

    def work(item: int) -> int:
        if item == 3:
            raise SourceError
        done.append(item)
        return item

    results = in_order(work, range(1000), threads=2)
    with pytest.raises(SourceError):
        list(results)
    time.sleep(0.05)
    assert len(done) < 20


def test_nothing_to_do_starts_nothing() -> None:
    assert list(in_order(lambda item: item, [], threads=4)) == []


# ---- heads of answers ------------------------------------------------------------------------------------------------

ASKED = Asked(where="f", begin=10, nbytes=5, total_bytes=20, version='etag "1"')
HONEST = {"content-range": "bytes 10-14/20", "content-length": "5", "etag": '"1"'}


def test_an_honest_head_says_what_it_brings() -> None:
    head = read_head(ASKED, 206, HONEST)
    assert (head.nbytes, head.total_bytes, head.version) == (5, 20, 'etag "1"')
    unknown = Asked(where="f", begin=0, nbytes=50)
    short = read_head(unknown, 206, {"content-range": "bytes 0-19/20", "content-length": "20", "last-modified": "now"})
    assert (short.nbytes, short.total_bytes, short.version) == (20, 20, "modified now")
    assert read_head(unknown, 416, {"content-range": "bytes */0"}).total_bytes == 0
    assert read_head(unknown, 200, {"content-length": "20"}).total_bytes == 20


LIES = {
    "begins elsewhere": (206, HONEST | {"content-range": "bytes 9-14/20"}),
    "ends elsewhere": (206, HONEST | {"content-range": "bytes 10-13/20"}),
    "ends before it begins": (206, HONEST | {"content-range": "bytes 10-9/20"}),
    "ends beyond the end": (206, HONEST | {"content-range": "bytes 10-14/14"}),
    "another whole": (206, HONEST | {"content-range": "bytes 10-14/21"}),
    "another unit": (206, HONEST | {"content-range": "items 10-14/20"}),
    "a number beyond all": (206, HONEST | {"content-range": f"bytes 10-14/{'9' * 5000}"}),
    "no number": (206, HONEST | {"content-range": "bytes 10-14/\u0664"}),
    "another length": (206, HONEST | {"content-length": "4"}),
    "another version": (206, HONEST | {"etag": '"2"'}),
    "no version": (206, {key: value for key, value in HONEST.items() if key != "etag"}),
    "encoded": (206, HONEST | {"content-encoding": "br"}),
    "whole": (200, HONEST | {"content-length": "20"}),
    "no such range": (416, {"content-range": "bytes */20"}),
}


@pytest.mark.parametrize(("status", "headers"), LIES.values(), ids=LIES)
def test_a_head_that_lies_is_refused(status: int, headers: dict[str, str]) -> None:
    with pytest.raises(SourceError) as refused:
        read_head(ASKED, status, headers)
    assert str(refused.value).startswith("f: ")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7.0), ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0), ("soon", None), ("", None), ("-3", None),
     ("Thu, 01 Jan 99999999999999 00:00:00 GMT", None), ("Thu, 01 Jan 1970 00:00:00 +99999999999999999999", None)],
)  # fmt: skip
def test_how_long_a_server_wants_to_be_left_alone(text: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": text}, 10.0) == seconds


def test_an_answer_that_takes_memory_without_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter(range(100 << 20, 10 << 30, 40 << 20))
    monkeypatch.setattr(parallel, "_peak_bytes", lambda: next(peaks))
    over = threading.Event()
    try:
        with pytest.raises(SourceError) as refused:
            waited(lambda: over.wait(PATIENCE), GrowthLimit("s3://b/m", PATIENCE, 64 << 20))
    finally:
        over.set()
    assert str(refused.value) == "s3://b/m: an answer without end; expected at most 67108864 bytes"


def test_a_limit_of_memory_is_one_of_time_too_and_counts_what_this_process_really_takes() -> None:
    before = parallel._peak_bytes()
    held = bytes(32 << 20)
    assert parallel._peak_bytes() >= before >= len(held) // 4
    over = threading.Event()
    with pytest.raises(SourceError, match="too slow; expected everything within 0 s"):
        waited(lambda: over.wait(PATIENCE), GrowthLimit("s3://b/m", 0.1, 1 << 40))
    over.set()


@pytest.mark.parametrize(
    "listing",
    [
        Listing(files={"../a": FileFacts(name="../a", nbytes=1, version="v")}),
        Listing(files={"a": FileFacts(name="a", nbytes=-1, version="v")}),
        Listing(files={}, folders=("a\x1b[2J",)),
    ],
    ids=["leaves", "less than nothing", "obeyed by terminals"],
)
def test_a_kept_listing_that_no_source_has_counts_as_absent(tmp_path: Path, listing: Listing) -> None:
    shelf = Shelf("key", tmp_path)
    shelf.put_listing(Listing(files={"a": FACTS}))
    assert shelf.listing() is not None
    shelf.put_listing(listing)
    assert shelf.listing() is None


def test_a_proxy_whose_host_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://a\x0cb:80")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(SourceError, match="https_proxy: a proxy of another kind"):
        Connection(Origin("https", "example.com", 443), Limits())


@pytest.mark.parametrize("address", ["hf:org/name-", "hf:org/name.", "hf:org/a--b"])
def test_a_name_the_hub_has_not_is_no_address(address: str) -> None:
    with pytest.raises(SourceError, match="not an address on the hub"):
        open_source(address, limits=Limits(offline=True))
