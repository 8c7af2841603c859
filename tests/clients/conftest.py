"""Fixtures of tests in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from samples import load_script

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's Chromium, as the pictures of the pages are taken with it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = load_script("screenshots").chromium(playwright)
        yield launched
        launched.close()
