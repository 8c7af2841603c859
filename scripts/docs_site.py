"""Hooks of mkdocs: a page that would load anything from another server is refused.

Links to other sites are for readers to follow and are fine; what a browser fetches by itself is not. Code is not looked
into: what the theme's own scripts fetch, they fetch only for diagrams and versions, which no page has.
"""

from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

FETCHED = {
    "audio": "src", "embed": "src", "iframe": "src", "img": "src", "input": "src", "link": "href", "object": "data",
    "script": "src", "source": "src", "track": "src", "video": "src",
}  # fmt: skip
"""Elements a browser fetches something for, and the attribute that says what."""
NOT_FETCHED = frozenset({"canonical", "next", "prev"})
"""Relations of a link that name a page."""


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Refuse a page that loads something from elsewhere; pages stay as they are.

    Raises:
        PluginError: It does; the message names page and address.
    """
    elsewhere = fetched_elsewhere(output)
    if elsewhere:
        from mkdocs.exceptions import PluginError  # noqa: PLC0415 - the tests have no mkdocs

        raise PluginError(f"{page.file.src_uri}: loads {', '.join(elsewhere)}")
    return output


def fetched_elsewhere(html: str) -> list[str]:
    """Return the addresses on other servers that a browser fetches for a page by itself.

    >>> fetched_elsewhere('<a href="https://x.org">x</a> <script src="//cdn.x.org/a.js"></script> <img src="a.png">')
    ['//cdn.x.org/a.js']
    """
    found = _Fetched()
    found.feed(html)
    return found.addresses


class _Fetched(HTMLParser):
    """Collects what is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at one element."""
        said = dict(attrs)
        address = said.get(FETCHED.get(tag, "")) or ""
        if NOT_FETCHED & set((said.get("rel") or "").split()):
            return
        if urlsplit(address).netloc:
            self.addresses.append(address)
