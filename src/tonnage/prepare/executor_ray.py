"""The tasks of a preparation on the nodes of a Ray cluster, in an output directory they all see.

The driver keeps lock and journal. A task on a node holds no lock, and may outlive a driver that was killed, or a
network that failed: so its temporary names are of one attempt alone, and before a file gets its final name it asks
whether its run is still on (:func:`tonnage.prepare.output_dir.check_epoch`). Every node is looked at before the first
task: it has this version of the program, sees the source, and sees the very directory of this run.

Ray is imported when a cluster is used; nothing of a cluster is started here but tasks.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tonnage.errors import Problem, one_line, raise_if_any
from tonnage.prepare.executors import Event, Run
from tonnage.prepare.io import RESUME, PrepareError
from tonnage.prepare.journal import JobRecord
from tonnage.prepare.messages import Progress, Refused, Setup, Task
from tonnage.prepare.output_dir import EPOCH_FILE, begin_epoch, end_epoch, remove_partials
from tonnage.prepare.preparation import Preparation
from tonnage.prepare.ray_connection import WHERE, connected
from tonnage.prepare.worker import answer_task
from tonnage.sources.addresses import is_remote
from tonnage.units import MIB
from tonnage.version import __version__

MOST_ATTEMPTS = 3
"""At one task: a worker or a node may be lost for reasons that pass."""
RAY_WORKER_BYTES = 128 * MIB
"""Anonymous memory of a Ray worker that does nothing yet."""
_MODULES = ("blake3", "numba", "numpy")
_LOOK_SECONDS = 60
_END_SECONDS = 20
_WAIT_SECONDS = 1.0
_CHECK_SECONDS = 3.0
_SHARE = 0.001
"""Of a resource, asked for to be placed where it is."""

_Look = tuple[str | None, str | None, bool, tuple[str, ...]]
"""Of a node: version of this program, epoch of the output directory, whether the source is there, missing modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """A cluster whose nodes do the tasks; called, it is an :data:`~tonnage.prepare.executors.Executor`.

    Attributes:
        address: As Ray takes it; that of ``RAY_ADDRESS``, or the cluster this machine is in, if not given.
        node_resource: Only nodes with this resource of Ray are used, such as ``node:10.0.0.7``, which one node has.
        most_tasks: At once; by default as many as the nodes have CPUs.
    """

    address: str | None = None
    node_resource: str | None = None
    most_tasks: int | None = None

    @contextmanager
    def __call__(self, preparation: Preparation, lock: int) -> Iterator[Run]:  # noqa: ARG002 - no node can hold it
        """Connect, look at every node, and yield what does tasks there; on leaving they are ended.

        Raises:
            PrepareError: There is no such cluster, or a node cannot do the work; every such node is named.
        """
        setup = _everywhere(preparation.setup)
        needed = preparation.task_memory_bytes + RAY_WORKER_BYTES
        with connected(self.address) as (ray, signals), ExitStack() as stack:
            setup = replace(setup, epoch=begin_epoch(setup.output))
            stack.callback(end_epoch, setup.output)
            tasks = _Tasks(ray, self, setup, needed, signals.heed)
            stack.callback(tasks.end)
            stack.callback(end_epoch, setup.output)  # first of all: from then on nothing gets a final name
            tasks.check_nodes()
            yield tasks.run


def _everywhere(setup: Setup) -> Setup:
    """Return a setup with paths that mean the same whatever the current directory is."""
    address = setup.address if is_remote(setup.address) else str(Path(setup.address).absolute())
    return replace(setup, address=address, output=setup.output.absolute())


# --- tasks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A node that tasks may come to.

    Attributes:
        identifier: As Ray knows it.
        address: Of its network; several nodes on one machine have one.
        slots: Tasks it has CPUs and memory for.
    """

    identifier: str
    address: str
    slots: int

    def cannot(self, what: str, *, expected: str | None = None, found: str | None = None) -> Problem:
        """Return why it does no tasks."""
        return Problem(where=f"node {self.address} ({self.identifier[:8]})", what=what, expected=expected, found=found)


@dataclass(slots=True, eq=False)
class _Attempt:
    """A task on its way: which attempt it is, where, and how much it told of."""

    task: Task
    number: int
    node: _Node | None = None
    nbytes: int = 0


class _Tasks:
    """The tasks of one run that are on the nodes.

    Every task is given a node: of a node that is gone, or cut off, nothing is heard for minutes, and Ray would wait.
    """

    def __init__(
        self, ray: Any, cluster: RayCluster, setup: Setup, memory_bytes: int, heed: Callable[[], None]
    ) -> None:
        """Take a connection.

        Args:
            ray: The module, connected.
            cluster: What is wanted of it.
            setup: With an epoch.
            memory_bytes: Of every task at most.
            heed: Called often: raises what a signal is to raise.
        """
        self._ray = ray
        self._heed = heed
        self._cluster = cluster
        self._setup = setup
        self._memory_bytes = memory_bytes
        self._nodes = self._found()
        self._running: dict[Any, _Attempt] = {}
        self._lost: deque[_Attempt] = deque()
        self._checked = time.monotonic()
        self._task = ray.remote(_do_task)
        self._needs = {
            "num_cpus": 1,
            "memory": memory_bytes,
            "resources": {cluster.node_resource: _SHARE} if cluster.node_resource else {},
            "num_returns": "streaming",
            "max_retries": 0,
        }

    def check_nodes(self) -> None:
        """Refuse nodes that cannot do tasks.

        Raises:
            PrepareError: Every such node is named; or there is none.
        """
        self._check_any()
        look = self._ray.remote(_looking(self._setup))
        asked = {
            look.options(num_cpus=0, max_retries=0, scheduling_strategy=self._on(node)).remote(): node
            for node in self._nodes
        }
        patience = time.monotonic() + _LOOK_SECONDS
        answered: list[Any] = []
        while len(answered) < len(asked) and time.monotonic() < patience:
            answered, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=_WAIT_SECONDS)
            self._heed()
        problems: list[Problem] = []
        for answer, node in asked.items():
            try:
                found = self._ray.get(answer) if answer in answered else None
            except self._ray.exceptions.RayError as error:
                problems.append(node.cannot("cannot be looked at", found=_first_line(error)))
                continue
            problems += _node_problems(node, found, self._setup)
        raise_if_any(PrepareError, problems)

    def run(self, tasks: Iterable[Task]) -> Iterator[Event]:
        """Do tasks; see :data:`tonnage.prepare.executors.Run`."""
        waiting = iter(tasks)
        while self._hand_out(waiting):
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_WAIT_SECONDS)
            self._heed()
            for stream in ready:
                yield from self._hear(stream)
            yield from self._check_left()

    def end(self) -> None:
        """End the tasks that are on their way, and wait until they are gone, unless a node does not answer."""
        errors = self._ray.exceptions.RayError
        for stream in self._running:
            with suppress(errors, ValueError):
                self._ray.cancel(stream, force=True)
        ends = [stream.completed() for stream in self._running]
        if ends:
            with suppress(errors):
                self._ray.wait(ends, num_returns=len(ends), timeout=_END_SECONDS)
        self._running.clear()

    def _found(self) -> tuple[_Node, ...]:
        """Return the nodes of the cluster that have what a task needs."""
        name = self._cluster.node_resource
        nodes = []
        for node in self._ray.nodes():
            having = node["Resources"]
            slots = min(int(having.get("CPU", 0)), int(having.get("memory", 0)) // self._memory_bytes)
            if node["Alive"] and slots and (name is None or having.get(name, 0) >= _SHARE):
                nodes.append(_Node(identifier=node["NodeID"], address=node["NodeManagerAddress"], slots=slots))
        return tuple(nodes)

    def _check_any(self) -> None:
        if not self._nodes:
            name = self._cluster.node_resource
            having = f" and the resource {name}" if name else ""
            what = f"no node of the cluster can do the work; {RESUME}"
            expected = f"one with a CPU, {self._memory_bytes} bytes of memory{having}"
            raise PrepareError(Problem(where=WHERE, what=what, expected=expected))

    def _check_left(self) -> Iterator[Event]:
        """Take back the tasks of nodes that are gone; nodes that came later do none, for nobody looked at them.

        Raises:
            PrepareError: None is left, or a task was begun often enough.
        """
        if time.monotonic() - self._checked < _CHECK_SECONDS:
            return
        self._checked = time.monotonic()
        left = {node.identifier for node in self._found()}
        self._nodes = tuple(node for node in self._nodes if node.identifier in left)
        for stream, attempt in list(self._running.items()):
            if attempt.node not in self._nodes:
                yield from self._lose(stream, "its node is gone")
        self._check_any()

    def _hand_out(self, waiting: Iterator[Task]) -> bool:
        """Begin tasks while there may be more of them, and return whether any is on its way."""
        while (node := self._free_node()) is not None:
            attempt = self._lost.popleft() if self._lost else None
            if attempt is None and (task := next(waiting, None)) is not None:
                attempt = _Attempt(task=task, number=1)
            if attempt is None:
                break
            attempt.node = node
            named = replace(
                attempt.task, attempt=secrets.token_hex(8), state=""
            )  # of this machine, and that is another
            stream = self._task.options(**self._needs, scheduling_strategy=self._on(node)).remote(named, self._setup)
            self._running[stream] = attempt
        return bool(self._running)

    def _free_node(self) -> _Node | None:
        """Return the node with most room for one more task; ``None`` if there is none, or there are enough tasks.

        Beside the tasks a node has room for, as many wait there for their turn, so that it is never idle between two.
        """
        if self._cluster.most_tasks is not None and len(self._running) >= self._cluster.most_tasks:
            return None
        used = Counter(attempt.node for attempt in self._running.values())
        free = [node for node in self._nodes if used[node] < 2 * node.slots]
        return max(free, key=lambda node: 2 * node.slots - used[node], default=None)

    def _on(self, node: _Node) -> Any:
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        return affinity(node_id=node.identifier, soft=False)

    def _hear(self, stream: Any) -> Iterator[Event]:
        """Yield what a task says next; what it said is taken back if it is lost, and it is begun again."""
        attempt = self._running[stream]
        try:
            message = self._ray.get(next(stream))
        except StopIteration:
            yield from self._lose(stream, "no answer")
            return
        except self._ray.exceptions.RayTaskError as error:
            raise RuntimeError(f"a bug in a worker, at {attempt.task.title}; it said:\n{error}") from error
        except self._ray.exceptions.RayError as error:
            yield from self._lose(stream, _first_line(error))
            return
        if isinstance(message, Progress):
            attempt.nbytes += message.nbytes
            yield message
        elif isinstance(message, JobRecord):
            del self._running[stream]
            yield attempt.task, message
        else:
            assert isinstance(message, Refused)
            raise PrepareError(*message.problems)

    def _lose(self, stream: Any, found: str) -> Iterator[Event]:
        """Take a task back whose worker or node is gone; what it left unfinished is removed, should it still be at it.

        Raises:
            PrepareError: It was begun often enough.
        """
        attempt = self._running.pop(stream)
        if attempt.number == MOST_ATTEMPTS:
            what = f"its worker was lost {MOST_ATTEMPTS} times; {RESUME}"
            raise PrepareError(Problem(where=attempt.task.title, what=what, found=found))
        remove_partials(self._setup.output, attempt.task.paths)
        yield Progress(-attempt.nbytes)
        self._lost.append(_Attempt(task=attempt.task, number=attempt.number + 1))


def _first_line(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


# --- on a node --------------------------------------------------------------------------------------------------------


def _do_task(task: Task, setup: Setup) -> Iterator[Progress | JobRecord | Refused]:
    """Do a task and yield what it says, while it is done in a thread."""
    said: SimpleQueue[Progress | JobRecord | Refused | BaseException] = SimpleQueue()

    def answer() -> None:
        try:
            answer_task(task, setup, said.put)
        except BaseException as error:  # noqa: BLE001 - raised again where Ray reports it
            said.put(error)

    threading.Thread(target=answer, daemon=True).start()
    while isinstance(message := said.get(), Progress):
        yield message
    if isinstance(message, BaseException):
        raise message
    yield message


def _looking(setup: Setup) -> Callable[[], _Look]:
    """Return what looks at a node. A function of no module: it is sent whole, and runs where this program is not."""
    epoch_file, modules = str(setup.output / EPOCH_FILE), _MODULES
    source = None if is_remote(setup.address) else setup.address

    def look() -> _Look:
        from contextlib import suppress  # noqa: PLC0415 - sent whole
        from importlib.util import find_spec  # noqa: PLC0415 - same
        from pathlib import Path  # noqa: PLC0415 - same

        version: str | None = None
        epoch: str | None = None
        with suppress(ImportError):
            from tonnage.version import __version__ as version  # noqa: PLC0415 - same
        with suppress(OSError, UnicodeDecodeError):
            epoch = Path(epoch_file).read_text(encoding="ascii")
        missing = tuple(name for name in modules if find_spec(name) is None)
        return version, epoch, source is None or Path(source).is_dir(), missing

    return look


def _node_problems(node: _Node, found: _Look | None, setup: Setup) -> Iterator[Problem]:
    """Yield why a node cannot do tasks."""
    if found is None:
        yield node.cannot(f"did not answer in {_LOOK_SECONDS} s")
        return
    version, epoch, has_source, missing = found
    if version != __version__:
        yield node.cannot("another version of tonnage", expected=__version__, found=version or "none")
    if missing:
        yield node.cannot("modules are missing", expected="pip install 'tonnage[ray]'", found=", ".join(missing))
    if epoch != setup.epoch:
        expected = f"{setup.output} on a file system that all nodes see, or --node-resource of those that do"
        there = "nothing of this run" if epoch is None else "another directory of this name"
        yield node.cannot("does not see the output directory", expected=expected, found=there)
    if not has_source:
        yield node.cannot("does not see the source", expected=f"{setup.address}, as it is here")
