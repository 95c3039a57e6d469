"""Sandboxes of these tests are on their own: own records, own templates, no packages to install."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = tmp_path_factory.mktemp("paracle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARACLE_TEMPLATE_BUILD", "0")
        for name in ("PARACLE_STATE_DIR", "PARACLE_DATA_DIR"):
            patch.setenv(name, str(base / name.lower()))
        yield
