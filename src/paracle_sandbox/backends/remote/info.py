"""Checks what a service says about itself, and whether it is one."""

from __future__ import annotations


def info_problem(info: object) -> str | None:
    """Return why an answer to ``GET /info`` is not that of a service that can make sandboxes now;
    None when it is."""
    if not isinstance(info, dict) or not {"version", "backend"} <= info.keys():
        return "what answers there is not a sandbox service"
    # Older services do not say.
    return None if info.get("ready", True) is True else "it is not ready to make sandboxes"
