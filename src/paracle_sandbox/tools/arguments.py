"""Makes the arguments that models write regular.

Models use other names and types than the schema, wrap arguments in objects, and put fences around
code. All of that is accepted where its meaning is clear."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

# Arguments that models add as remarks. They are ignored if a tool has no such argument.
_REMARKS = frozenset(
    [
        "description",
        "explanation",
        "reason",
        "reasoning",
        "thought",
        "thoughts",
        "comment",
        "purpose",
        "language",
    ]
)
# Names of an object that some models put around all arguments.
_WRAPPERS = frozenset(["arguments", "parameters", "params", "args", "kwargs", "input"])

_FENCE = re.compile(r"\A\s*```[\w+-]*[ \t]*\n(.*?)\n?```\s*\Z", re.DOTALL)
_INNER_FENCE = re.compile(r"^```(?:python3?|py)[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)

_SECONDS = re.compile(r"(?<=\d)\s*s(?:ec(?:ond)?s?)?\s*\Z", re.IGNORECASE)


class ArgumentFault(ValueError):
    """Arguments that cannot be used. The message tells a model what to send instead."""


def parse_arguments(raw: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Parse the arguments of a call. Raises ArgumentFault when they are not a JSON object."""
    if raw is None or raw == "":
        return {}
    if isinstance(raw, Mapping):
        return _unwrap(dict(raw))
    try:
        value = json.loads(_strip_fence(raw), strict=False)
        if isinstance(value, str):  # it was encoded twice
            value = json.loads(value, strict=False)
    except (ValueError, RecursionError) as error:
        raise ArgumentFault(
            f"The arguments are not valid JSON ({error}). Call the tool again with one JSON object."
        ) from None
    if not isinstance(value, dict):
        raise ArgumentFault(
            f"The arguments must be one JSON object, not {type(value).__name__}. Call the tool "
            "again with an object."
        )
    return _unwrap(value)


def _unwrap(value: dict[str, Any]) -> dict[str, Any]:
    if len(value) == 1 and (key := next(iter(value))) in _WRAPPERS and isinstance(value[key], dict):
        return dict(value[key])
    return value


def _strip_fence(text: str) -> str:
    fenced = _FENCE.match(text)
    return fenced[1] if fenced else text


def normalize_name(name: str) -> str:
    """Return a name in one spelling, so that filePath, file-path and file_path are equal."""
    return name.lower().replace("_", "").replace("-", "")


def rename_arguments(
    arguments: Mapping[str, Any], schema: Schema, aliases: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments under the schema's names. If an argument comes under its own name and
    an alias, its own name wins. Raises ArgumentFault."""
    properties: Mapping[str, Schema] = schema["properties"]
    names = {**{normalize_name(alias): known for alias, known in aliases.items()},
             **{normalize_name(known): known for known in properties}}  # fmt: skip
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        known = name if name in properties else names.get(normalize_name(name))
        if known is None and normalize_name(name) in _REMARKS:
            continue
        if known is None:
            raise ArgumentFault(
                f"There is no argument {name!r}; there are {', '.join(properties) or 'none'}."
            )
        if value is not None and (name == known or arguments.get(known) is None):
            found[known] = value
    return found


def to_regular_arguments(
    arguments: Mapping[str, Any], schema: Schema, aliases: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments under the names and types of the schema. Raises ArgumentFault."""
    return fit_to_schema(rename_arguments(arguments, schema, aliases), schema)


def fit_to_schema(arguments: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Convert arguments that have the schema's names to its types, and demand the required ones.
    Raises ArgumentFault."""
    properties: Mapping[str, Schema] = schema["properties"]
    found = {
        name: convert_value(name, value, properties[name]) for name, value in arguments.items()
    }
    missing = [name for name in schema.get("required", ()) if name not in found]
    if missing:
        raise ArgumentFault(f"The argument {missing[0]!r} is missing.")
    return found


def convert_value(name: str, value: Any, schema: Schema) -> Any:
    """Convert a value to the type in the schema. Raises ArgumentFault if that is not clear."""
    kind = schema["type"]
    if kind == "string":
        value = _to_text(name, value)
    elif kind == "boolean":
        value = to_boolean(name, value)
    elif kind == "number":
        value = _to_number(name, value, schema)
    elif kind == "array":
        value = _to_list(name, value)
    allowed = schema.get("enum")
    if allowed and value not in allowed:
        raise ArgumentFault(f"{name} must be one of {', '.join(allowed)}, not {value!r}.")
    return value


def _to_text(name: str, value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, dict | list):
        return json.dumps(value, indent=2)
    if not isinstance(value, str):
        raise ArgumentFault(f"{name} must be text, not {type(value).__name__}.")
    return value


def to_boolean(name: str, value: Any) -> bool:
    """Convert a value such as "yes" or 0. Raises ArgumentFault for any other."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    answer = words.get(str(value).strip().lower())
    if answer is None:
        raise ArgumentFault(f"{name} must be true or false, not {value!r}.")
    return answer


def _to_number(name: str, value: Any, schema: Schema) -> float:
    try:
        number = float(_SECONDS.sub("", value) if isinstance(value, str) else value)
    except (TypeError, ValueError):
        raise ArgumentFault(f"{name} must be a number, not {value!r}.") from None
    low, high = schema.get("minimum", 0), schema.get("maximum", 86_400)
    if not low <= number <= high:
        raise ArgumentFault(f"{name} must be between {low} and {high}, not {value!r}.")
    return number


def _to_list(name: str, value: Any) -> list[str]:
    """Convert to a list. One text may name several: "numpy, pandas" or "numpy and pandas"."""
    if isinstance(value, str):
        words = re.split(r"[\s,]+", value.replace(" and ", " ").strip())
        value = [word for word in words if word]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ArgumentFault(f"{name} must be a list of texts.")
    return value


def extract_code(text: str) -> str:
    """Return the code without Markdown fences: one around all of it, or the Python blocks of a
    message. Text without fences is returned as it is."""
    whole = _FENCE.match(text)
    if whole and "```" not in whole[1]:
        return whole[1] + "\n"
    blocks = _INNER_FENCE.findall(text)
    return "\n".join(blocks) if blocks else text
