"""Converts the values and errors of a cell to text and images.

This file is a part of the program that driver.py belongs to.
"""

import base64
import io
import json
import sys
import traceback
from typing import TYPE_CHECKING, Any, Dict, Optional

if TYPE_CHECKING:
    # The text of layout.py and printers.py, which is compiled only when a value needs it.
    LAYOUT = ""

MAX_TEXT = 20000
MAX_ITEMS = 1000
MAX_PNG = 8 << 20
MAX_ENCODED = MAX_PNG * 4 // 3 + 4
MAX_JSON = 1 << 20
METHODS = (
    ("text/html", "_repr_html_"), ("text/markdown", "_repr_markdown_"),
    ("text/latex", "_repr_latex_"), ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"), ("image/jpeg", "_repr_jpeg_"),
    ("application/json", "_repr_json_"),
)  # fmt: skip

LAYOUT_NAMES: Dict[str, Any] = {}


def count_items(value: Any, room: int) -> int:
    """Count the items of a container and the container itself, but stop above ``room``."""
    found = 1
    if type(value) in (list, tuple, dict, set, frozenset):
        found += len(value)
        for item in value.values() if type(value) is dict else value:
            if found > room:
                break
            found += count_items(item, room - found) - 1
    return found


def to_plain_text(value: Any) -> str:
    """Return the text of a value, as IPython shows it, cut to MAX_TEXT."""
    if type(value) in (str, bytes, bytearray) and len(value) > MAX_TEXT:
        return repr(value[:MAX_TEXT]) + "... (%d in all)" % len(value)
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if not LAYOUT_NAMES:
        exec(compile(LAYOUT, "<layout>", "exec"), LAYOUT_NAMES)  # noqa: S102 - our own text
    return str(LAYOUT_NAMES["lay_out"](value, MAX_TEXT))


def describe(value: Any) -> Dict[str, str]:
    """Return a value by media type: as text, and in the forms that its class offers. A form that
    fails is reported on stderr; the others are shown, and the cell goes on."""
    bundle = try_call(call_method, value, "_repr_mimebundle_", include=None, exclude=None)
    found: Dict[str, Any] = dict(bundle) if isinstance(bundle, dict) else {}
    if "text/plain" not in found:
        found["text/plain"] = try_call(to_plain_text, value)
    for kind, method in METHODS:
        if kind not in found:
            found[kind] = try_call(call_method, value, method)
    if is_figure(value):
        found["image/png"] = try_call(to_png, value)
    if type(value) in (dict, list):
        found["application/json"] = value
    return encode_bundle(found)


def try_call(make: Any, *given: Any, **named: Any) -> Any:
    """Call ``make`` and return its result, or report its failure on stderr and return None."""
    try:
        return make(*given, **named)
    except NotImplementedError:
        return None  # the value does not have this form
    except Exception as error:  # noqa: BLE001 - a cell's own class may do anything
        try:
            sys.stderr.write(describe_error(error)["traceback"])
        except (AttributeError, ValueError, OSError):
            pass  # a cell may have replaced sys.stderr by anything
        return None


def call_method(value: Any, name: str, **given: Any) -> Any:
    """Call a method of the value and return its data, without the metadata it may add."""
    try:
        # A class has the method for its instances, and some values have every attribute.
        if isinstance(value, type) or hasattr(value, "_no_value_has_this_"):
            return None
        method = getattr(value, name, None)
    except Exception:  # noqa: BLE001 - a lookup that fails finds nothing
        return None
    data = method(**given) if callable(method) else None
    return data[0] if isinstance(data, tuple) and len(data) == 2 else data


def encode_bundle(found: Dict[str, Any]) -> Dict[str, str]:
    """Return the part of a bundle that can be sent: texts, and bytes in base64."""
    texts = {}
    for kind in ("text/plain", *dict(METHODS)):
        data = found.get(kind)
        if kind == "application/json" and not isinstance(data, (str, type(None))):
            data = to_json(data)
        if isinstance(data, bytes) and len(data) <= MAX_PNG:
            data = base64.b64encode(data).decode()
        if isinstance(data, str) and len(data) <= MAX_ENCODED:
            texts[kind] = data
    return texts


def to_json(value: Any) -> Optional[str]:
    """Return a value as JSON, or None if JSON cannot express it, such as NaN."""
    try:
        if count_items(value, MAX_ITEMS) > MAX_ITEMS:
            return None
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return text if 0 < len(text) <= MAX_JSON else None


def is_figure(value: Any) -> bool:
    return str(type(value).__module__).startswith("matplotlib.") and hasattr(value, "savefig")


def to_png(figure: Any) -> str:
    target = io.BytesIO()
    figure.savefig(target, format="png", bbox_inches="tight")
    return base64.b64encode(target.getvalue()[:MAX_PNG]).decode()


def describe_error(error: BaseException) -> Dict[str, str]:
    """Return name, message and traceback of an error, with the frames of the cell only."""
    frames = traceback.TracebackException(type(error), error, error.__traceback__)
    # Keep the frames from the cell on. A SyntaxError of the cell has no frame of it.
    while frames.stack and not frames.stack[0].filename.startswith("<cell "):
        del frames.stack[0]
    try:
        text, value = "".join(frames.format()), str(error)
    except Exception as second:  # noqa: BLE001 - a cell's own class may do anything
        text = value = "%s (which cannot be shown: %s)" % (type(error).__name__, second)
    return {"name": type(error).__name__, "value": value[:MAX_TEXT], "traceback": text[-MAX_TEXT:]}
