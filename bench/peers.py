"""Other tools and this one on the same inputs, in one run: planners, converters, readers of headers, verification.

Planners are asked about public logs and vLLM's own classes (``peers/planners.py``), converters about the same weights
(``peers/converting.py``), readers about the same headers, true and hostile (``peers/reading.py``), verification about
the same package, whole and spoilt (``peers/verifying.py``). Peers live in environments of their own, made when they
are not there. What is measured, and what a peer cannot be asked, is in RESULTS.md.

Run: python bench/peers.py [--write] [--only SECTION] [--directory DIR]   (``--write`` puts the tables into RESULTS.md)
Exit status 1 if a miss of this tool has no reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import converting
import planners
import reading
import verifying
from environments import commit, machine

RESULTS = Path(__file__).parent / "RESULTS.md"
Section = Callable[[Path], tuple[list[str], bool]]
SECTIONS: dict[str, Section] = {
    "planners": lambda _: planners.section(),
    "conversion": converting.section,
    "headers": reading.section,
    "verify": verifying.section,
}


def begin(name: str) -> str:
    """Return the line before the tables of a section."""
    return f"<!-- peers, {name}: written by bench/peers.py -->"


def end(name: str) -> str:
    """Return the line after them."""
    return f"<!-- end of peers, {name} -->"


def put(page: str, name: str, text: str) -> str:
    """Return the page with the text between the lines of a section, and everything else as it was.

    Raises:
        ValueError: The page does not have both lines once, in this order.
    """
    before, opened, rest = page.partition(begin(name))
    _, closed, after = rest.partition(end(name))
    if not opened or not closed or begin(name) in rest or end(name) in before + after:
        raise ValueError(f"{RESULTS.name}: no place for the tables of {name}")
    return f"{before}{opened}\n\n{text.strip()}\n\n{closed}{after}"


def main() -> int:
    """Run the sections and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into RESULTS.md")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="one section; may be repeated")
    parser.add_argument("--directory", type=Path, help="for what is written; the system's temporary one by default")
    options = parser.parse_args()
    fine = True
    for name in options.only or SECTIONS:
        began, where = time.monotonic(), f"`{commit()}`, {machine()}"
        with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
            lines, explained = SECTIONS[name](Path(scratch))
        fine = fine and explained
        text = "\n".join([*lines, "", f"Measured with {where}; {time.monotonic() - began:.0f} s in all."])
        print(f"{text}\n", flush=True)
        if options.write:
            RESULTS.write_text(put(RESULTS.read_text(), name, text))
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
