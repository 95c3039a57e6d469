"""Describes the arguments of tools as JSON schema, so that a tool's parameters read as a table."""

from __future__ import annotations

from typing import Any

from .arguments import Schema


def schema(required: list[str], **properties: dict[str, Any]) -> Schema:
    """Return the schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def text(description: str, *, enum: list[str] | None = None) -> dict[str, Any]:
    """Return the schema of a text, or of one of the texts in ``enum``."""
    found: dict[str, Any] = {"type": "string", "description": description}
    return {**found, "enum": enum} if enum else found


def boolean(description: str) -> dict[str, Any]:
    """Return the schema of true or false."""
    return {"type": "boolean", "description": description}


def seconds(description: str) -> dict[str, Any]:
    """Return the schema of a time of up to an hour."""
    return number(description, least=0.1, most=3600)


def number(description: str, *, least: float = 1, most: float = 10_000_000) -> dict[str, Any]:
    """Return the schema of a number between ``least`` and ``most``."""
    return {"type": "number", "description": description, "minimum": least, "maximum": most}


def texts(description: str) -> dict[str, Any]:
    """Return the schema of a list of texts."""
    return {"type": "array", "items": {"type": "string"}, "description": description}
