"""Which rank wrote a line: out of its prefix, never out of its message.

Known prefixes: ``(Worker_DP0_TP1 pid=7)`` and ``(EngineCore_DP0 pid=3)`` of vLLM, ``(RayWorkerWrapper pid=9, ip=..)``,
``(VllmWorker rank=1 pid=5)``, ``[2026-01-31 10:00:00 DP0 TP1]`` and ``TP1`` of SGLang, and ``[rank1]`` of torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEAD = 240
"""A prefix ends before so many characters of a line."""

_AXES = ("DP", "PP", "PCP", "DCP", "CP", "TP", "EP", "RANK", "GPU")
_AXIS = r"(?:DP|PP|PCP|DCP|CP|TP|EP)"
_COORDINATE = re.compile(rf"({_AXIS})(\d{{1,5}})(?![A-Za-z0-9])", re.ASCII)
_PROCESS = re.compile(
    r"\((?P<name>[A-Za-z]\w{0,60})(?: rank=(?P<rank>\d{1,5}))? pid=(?P<pid>\d{1,10})"
    r"(?:, ip=(?P<ip>[0-9a-fA-F.:]{2,45}))?\)",
    re.ASCII,
)
_STAMPED = re.compile(rf"\[\d{{4}}-\d\d-\d\d[ T][\d:.,]{{5,18}}(?P<axes>(?: {_AXIS}\d{{1,5}}){{1,7}})\]", re.ASCII)
_BARE = re.compile(
    rf"(?:^|[|\]] )\s{{0,4}}\[?(?P<axes>{_AXIS}\d{{1,5}}(?:[ _]{_AXIS}\d{{1,5}}){{0,6}})(?:[\]:]| (?=\S))", re.ASCII
)
_TORCH = re.compile(r"\[rank ?(?P<rank>\d{1,5})\]", re.ASCII)
_ENGINE_WIDE = ("EngineCore", "APIServer", "ApiServer", "DPCoordinator")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Rank:
    """Who wrote a line.

    Attributes:
        coordinates: Axis and place on it, in the order of ``DP PP PCP DCP CP TP EP RANK GPU``.
        process: A worker known by its process alone.
    """

    coordinates: tuple[tuple[str, int], ...] = ()
    process: str = ""

    @property
    def label(self) -> str:
        """The rank as it is printed; ``all`` if the line names none."""
        named = " ".join(f"{axis}{place}" for axis, place in self.coordinates)
        return " ".join(part for part in (named, self.process) if part) or "all"

    @property
    def is_engine(self) -> bool:
        """Whether it is a whole engine that wrote: no axis but DP is named."""
        return not self.process and all(axis == "DP" for axis, _ in self.coordinates)

    def place(self, axis: str) -> int | None:
        """Return the place on an axis, if it is named."""
        return dict(self.coordinates).get(axis)

    def encloses(self, other: Rank) -> bool:
        """Whether what this one wrote holds for the other: it is its engine, or it."""
        return self == other or (
            self.is_engine and (self.place("DP") is None or other.place("DP") in (None, self.place("DP")))
        )


def rank_of(line: str) -> Rank:
    """Return the rank in the prefix of a line."""
    head = line[:_HEAD]
    places: dict[str, int] = {}
    process = ""
    for match in _PROCESS.finditer(head):
        found = _COORDINATE.findall(match["name"])
        places.update((axis, int(place)) for axis, place in found)
        if match["rank"] is not None:
            places["RANK"] = int(match["rank"])
        elif not match["name"].startswith(_ENGINE_WIDE):
            process = "" if found else _process(match)
    for regex in (_STAMPED, _BARE):
        if not places:
            places.update(
                (axis, int(place))
                for match in regex.finditer(head)
                for axis, place in _COORDINATE.findall(match["axes"])
            )
    torch = None if places or process else _TORCH.search(head)
    if torch is not None:
        places["RANK"] = int(torch["rank"])
    return Rank(coordinates=tuple((axis, places[axis]) for axis in _AXES if axis in places), process=process)


def _process(match: re.Match[str]) -> str:
    return f"pid {match['pid']}" + (f" at {match['ip']}" if match["ip"] else "")
