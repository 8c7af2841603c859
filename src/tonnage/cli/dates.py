"""The date of a record or a package: given, of the build environment, or today."""

from __future__ import annotations

import datetime as dt
import os

from tonnage.errors import Problem, UnitError


def date_of(given: str | None) -> str:
    """Return ``--date``, else the UTC day of ``SOURCE_DATE_EPOCH``, else today in UTC, as ``YYYY-MM-DD``.

    Raises:
        UnitError: What was given is no date.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        if given is not None:
            return dt.datetime.strptime(given, "%Y-%m-%d").replace(tzinfo=dt.UTC).date().isoformat()
        if epoch is not None:
            return dt.datetime.fromtimestamp(int(epoch), tz=dt.UTC).date().isoformat()
    except (ValueError, OverflowError, OSError) as error:
        where, found = ("--date", given) if given is not None else ("SOURCE_DATE_EPOCH", epoch)
        expected = "YYYY-MM-DD" if given is not None else "seconds since 1970"
        raise UnitError(Problem(where=where, what="not a date", expected=expected, found=repr(found))) from error
    return dt.datetime.now(tz=dt.UTC).date().isoformat()
