"""A missing engine skips a test, or fails it where the engine was promised."""

from __future__ import annotations

import pytest

import engines


@pytest.fixture(autouse=True)
def no_engine(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> object:
    """Point the test at an address where no engine listens."""
    monkeypatch.setenv("PARACLE_TEST_RUN", str(tmp_path))
    monkeypatch.setenv("PARACLE_ENGINES_REASON", "")
    engines._why_not.cache_clear()
    yield
    engines._why_not.cache_clear()


@pytest.mark.parametrize("promised", ["", "vm", "gvisor, vm"])
def test_a_test_is_skipped_with_reason_and_remedy(
    promised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARACLE_REQUIRE_ENGINES", promised)
    with pytest.raises(pytest.skip.Exception, match=r"no docker: .*engines\.sh start docker"):
        engines.require("docker")


@pytest.mark.parametrize("promised", ["docker", "vm,docker", "vm docker gvisor"])
def test_what_was_promised_fails(promised: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARACLE_REQUIRE_ENGINES", promised)
    with pytest.raises(pytest.fail.Exception, match="no docker: "):
        engines.require("docker")


def test_the_reason_is_the_one_that_starting_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARACLE_REQUIRE_ENGINES", "")
    monkeypatch.setenv("PARACLE_ENGINES_REASON", "engines: starting an engine needs root")
    with pytest.raises(pytest.skip.Exception, match="no gvisor: engines: starting an engine needs"):
        engines.require("gvisor")
