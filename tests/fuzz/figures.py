"""Write figures of runs into the page: ``PYTHONPATH=tests python -m fuzz.figures FIGURES...``.

Rows of targets that were not run keep what they say; runs of one target are added up. What was found are its cases.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from fuzz.every import TARGETS
from fuzz.target import CRASHES, TESTS, files

PAGE = TESTS.parent / "docs" / "fuzzing.md"
_BEGIN, _END = "<!-- figures -->\n", "<!-- end of figures -->\n"
_ROW = re.compile(r"^\| `(\w+)` \| .+ \| ([\d,]+) \| ([\d,]+) \| (\d+) \| (\d+) \| \d+ \|$", re.MULTILINE)
_HEAD = "| target | parser | executions | CPU s | edges | features | found |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |\n"
Row = tuple[int, int, int, int]


def main() -> None:
    """Rewrite the page."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    table, _, after = rest.partition(_END)
    rows = {name: (_int(a), _int(b), int(c), int(d)) for name, a, b, c, d in _ROW.findall(table)}
    rows |= added(json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines())
    PAGE.write_text(before + _BEGIN + written({name: rows[name] for name in sorted(TARGETS)}) + _END + after)


def added(runs: Iterable[Mapping[str, float]]) -> dict[str, Row]:
    """Return executions, CPU seconds, edges and features by target."""
    rows: dict[str, Row] = {}
    for run in runs:
        done, seconds, edges, features = rows.get(str(run["target"]), (0, 0, 0, 0))
        rows[str(run["target"])] = (
            done + int(run["executions"]),
            seconds + round(run["cpu_seconds"]),
            max(edges, int(run["edges"])),
            max(features, int(run["features"])),
        )
    return rows


def written(rows: Mapping[str, Row]) -> str:
    """Return the table, and what it is together."""
    lines = []
    for name, (done, seconds, edges, features) in rows.items():
        parser = (TARGETS[name].run.__doc__ or "").partition("\n")[0].rstrip(".")
        found = len(files(CRASHES / name))
        lines.append(f"| `{name}` | {parser} | {done:,} | {seconds:,} | {edges} | {features} | {found} |\n")
    total, seconds = sum(row[0] for row in rows.values()), sum(row[1] for row in rows.values())
    return _HEAD + "".join(lines) + f"\n{total:,} executions in {seconds:,} CPU seconds.\n"


def _int(text: str) -> int:
    return int(text.replace(",", ""))


if __name__ == "__main__":
    main()
