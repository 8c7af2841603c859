"""Files that a browser loads: our own, and the script of the charts out of the package that brings it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from tonnage.report.picture import PICTURE_STYLE

STATIC = Path(__file__).parent / "static"
_A_DAY = "max-age=86400"


def asset_routes() -> tuple[BaseRoute, ...]:
    """Return the routes of all files."""
    script = package("plotly") / "package_data" / "plotly.min.js"

    async def plotly(_: Request) -> Response:
        return FileResponse(script, media_type="text/javascript", headers={"Cache-Control": _A_DAY})

    async def picture(_: Request) -> Response:
        return Response(PICTURE_STYLE, media_type="text/css")

    return (
        Route("/static/plotly.min.js", plotly),
        Route("/static/picture.css", picture),
        Mount("/static", StaticFiles(directory=STATIC)),
    )


def package(name: str) -> Path:
    """Return where a package is installed; it is found and not imported, which takes a second where it brings charts.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    found = find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return Path(found.origin).parent
