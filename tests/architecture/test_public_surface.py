"""No public name, parameter, field, setting, route, option or exit code goes or comes unnoticed."""

from __future__ import annotations

from imports import ROOT
from public_surface import surface

RECORDED = ROOT.parents[1] / "tests/golden/public_surface.txt"


def test_the_public_surface_is_the_recorded_one() -> None:
    recorded = RECORDED.read_text(encoding="utf-8").splitlines()
    now = surface()
    lost = sorted(set(recorded) - set(now))
    new = sorted(set(now) - set(recorded))
    assert not lost, f"users have these no more: {lost}"
    assert not new, f"record what is new (public_surface.py says how): {new}"
