"""One Chromium for all tests of a module."""

from __future__ import annotations

import pytest

from tests.browser.chromium import chromium


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started
