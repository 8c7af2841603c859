"""The process of the command: ``tonnage``, and ``python -m tonnage``."""

from __future__ import annotations

import signal
import sys

# Ctrl-C ends the command as it ends any other. What tidies up first says so: :mod:`tonnage.cli.interruption`.
signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Run the command."""
    try:
        from tonnage.cli import main as run  # noqa: PLC0415 - memory may not do for it
    except (MemoryError, SystemError):
        sys.stderr.write("tonnage: memory: not enough for this process\n")
        raise SystemExit(2) from None
    run()


if __name__ == "__main__":
    main()
