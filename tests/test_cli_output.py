"""What is printed, and what happens where nothing can be: streams that are closed, full, or lead to a terminal."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samples import prepare_small, without_privilege
from tonnage import cli
from tonnage.cli.options import json_text

Tonnage = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = Path(sys.executable).with_name("tonnage")
CONFIG = Path("tests/data/configs/moonshotai__Kimi-K3.json").absolute()


@given(st.text())
def test_json_shows_what_can_be_seen_and_escapes_the_rest(text: str) -> None:
    shown = json_text({"name": text})
    assert json.loads(shown) == {"name": text}
    assert all(line.isprintable() for line in shown.split("\n"))


def test_json_leaves_words_of_any_language_as_they_are() -> None:
    assert json_text({"name": "café 日本\x9b\x7f\u200b"}) == '{\n  "name": "café 日本\\u009b\\u007f\\u200b"\n}'


def shell(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", f"{COMMAND} {words}"], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
@pytest.mark.parametrize(("words", "status"), [(f"plan {CONFIG} --tp 8", 0), ("plan absent --tp 8", 2)])
def test_streams_that_lead_nowhere_leave_the_exit_code(closed: str, words: str, status: int) -> None:
    done = shell(f"{words} {closed}")
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert ("tonnage:" in done.stderr) == (status == 2 and closed == ">&-")
    assert "tonnage: " not in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", ["-h", "models", f"plan {CONFIG} --tp 8 --json"])
def test_results_that_cannot_be_written_are_one_line(words: str) -> None:
    done = shell(f"{words} >/dev/full")
    assert (done.returncode, done.stderr) == (2, "tonnage: cannot write the output; found No space left on device\n")


def test_a_file_does_not_get_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    prepare_small(tmp_path / "small", tmp_path / "open")
    for output, streams in (("open", ""), ("closed", "<&- >&- 2>&-")):
        words = f"prepare {tmp_path}/small --tp 2 --workers 1 --force -o {tmp_path}/{output} {streams}"
        assert shell(words).returncode == 0
    for path in (one for one in (tmp_path / "open" / "weights").rglob("*") if one.is_file()):
        assert path.read_bytes() == (tmp_path / "closed" / path.relative_to(tmp_path / "open")).read_bytes()


def test_a_path_the_system_refuses_is_one_line(tonnage: Tonnage, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    write = tmp_path / "key.pem"
    write.write_text("")
    name = "n" * 256  # a message has room for where the tests are, too
    for words, said in (
        (("measure", tmp_path / "loop"), "Too many levels of symbolic links"),
        (("measure", tmp_path / name), "cannot be used"),
        (("measure", tmp_path / "loop" / "x", tmp_path), "Too many levels of symbolic links"),
        (("verify", tmp_path / name, "--key", write), ""),
        (("export", tmp_path / name, "--key", write), "not a private key"),
        (("measure", tmp_path / "absent"), "no such directory"),
    ):
        done = tonnage(*words)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), (words, done.stderr)
        assert said in done.stderr


def test_memory_that_the_system_refuses_is_called_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(cli, "app", refused)
    before = signal.getsignal(signal.SIGPIPE)
    with pytest.raises(SystemExit) as end:
        cli.main()
    signal.signal(signal.SIGPIPE, before)
    assert (end.value.code, capsys.readouterr().err) == (2, "tonnage: memory: not enough for this process\n")


def test_what_may_not_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rank-0").mkdir()
    (tmp_path / "rank-0" / "a.safetensors").write_bytes(b"")
    (tmp_path / "rank-0").chmod(0o444)
    (tmp_path / "closed").mkdir(mode=0o000)
    try:
        for words in (
            ("measure", tmp_path),
            ("measure", tmp_path / "closed" / "in"),
            ("verify", tmp_path / "rank-0", "--key", "k"),
            ("calibrations", "list"),
            ("export", tmp_path / "rank-0", "--key", "k"),
        ):
            done = subprocess.run(
                [COMMAND, *words],
                env={**os.environ, "XDG_DATA_HOME": str(tmp_path / "closed" / "in")},
                capture_output=True,
                text=True,
                check=False,
                preexec_fn=without_privilege,
            )
            assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), (words, done.stderr)
    finally:
        for name in ("rank-0", "closed"):
            (tmp_path / name).chmod(0o755)


@pytest.mark.parametrize("kind", [MemoryError, SystemError])
def test_memory_that_does_not_do_is_one_line_whatever_says_so(
    tonnage_here: Tonnage, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fails() -> None:
        raise kind("error return without exception set")

    monkeypatch.setattr("tonnage.cli.app", fails)
    done = tonnage_here("models")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "tonnage: memory: not enough for this process\n")
