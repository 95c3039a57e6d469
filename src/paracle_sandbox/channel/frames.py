"""The frame format, shared by host and guest. Standard library only, Python 3.8.

A frame is a fixed header (type, stream, payload length) and a payload. Control payloads are
JSON objects, data payloads are raw bytes. The host chooses every stream number; stream 0 is
the channel itself.

    host -> guest                         guest -> host
    OPEN   {"op": name, ...}              HELLO   {...}          once, on stream 0
    DATA   bytes (stdin, file content)    DATA    bytes (stdout, file content, terminal)
    END    no more DATA                   STDERR  bytes
    SIGNAL {"kill": true} | {"signal": n} EVENT   {...}          an event before the end
           | {"resize": [rows, columns]}  RESULT  {...}          the end: it succeeded
    CREDIT u32                            ERROR   {"code", "message"}   the end: it failed
    PART   a piece of the next OPEN       CREDIT  u32

Flow control: in each direction of each stream the sender may have WINDOW payload bytes of
DATA, STDERR and EVENT under way. CREDIT gives back what the receiver has consumed. So a slow
reader stalls the writer, and memory stays bounded.

A request that is larger than a frame is sent as PARTs, which are full frames, and ends with the
OPEN. This happens because a program may have two megabytes of arguments and environment.
"""

import json
import struct
from json.encoder import c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

OPEN, DATA, STDERR, END, CREDIT, SIGNAL, EVENT, RESULT, ERROR, HELLO, PART = range(1, 12)

HEADER = struct.Struct(">BII")
MAX_PAYLOAD = 1 << 20
MAX_REQUEST = 8 << 20
WINDOW = 4 << 20
CHUNK = 256 << 10
MAX_DEPTH = 24
# How many values a guest may send in one message. A result has a few; an event of a listing has
# hundreds of files.
MAX_ANSWER_ITEMS = 1000
MAX_EVENT_ITEMS = 2000
# The kernel accepts no more arguments than this, however short each of them is.
MAX_REQUEST_ITEMS = 300_000

TO_GUEST = frozenset((OPEN, DATA, END, CREDIT, SIGNAL, PART))
TO_HOST = frozenset((DATA, STDERR, CREDIT, EVENT, RESULT, ERROR, HELLO))
CREDITED = frozenset((DATA, STDERR, EVENT))


def _make_encoder() -> Callable[[Any], str]:
    """Build one JSON encoder for all values. json.dumps would build one for each value, and each
    page that this writes to is copied in a guest."""
    plain = json.JSONEncoder(separators=(",", ":"))
    if c_make_encoder is None or encode_basestring_ascii is None:
        return plain.encode
    parts = c_make_encoder(
        None, plain.default, encode_basestring_ascii, None, ":", ",", False, False, True
    )
    return lambda value: "".join(parts(value, 0))


_encode = _make_encoder()
_DECODER = json.JSONDecoder()


class ProtocolError(Exception):
    """The other side sent something that breaks this protocol."""


def encode_header(kind: int, stream: int, length: int) -> bytes:
    """Encode the header of a frame, for a payload that is appended without a copy."""
    return HEADER.pack(kind, stream, length)


def encode(kind: int, stream: int, payload: bytes = b"") -> bytes:
    """Encode one whole frame. Raises ProtocolError if the payload is too large."""
    return HEADER.pack(kind, stream, len(check_size(payload))) + payload


def check_size(payload: bytes) -> bytes:
    """Return the payload if it fits into a frame. Raises ProtocolError otherwise."""
    if len(payload) > MAX_PAYLOAD:
        raise ProtocolError("a frame of %d bytes is too large" % len(payload))
    return payload


def encode_json(kind: int, stream: int, value: Dict[str, Any]) -> bytes:
    """Encode one whole frame with a JSON payload."""
    return encode(kind, stream, to_json(value))


def encode_request(stream: int, value: Dict[str, Any]) -> List[bytes]:
    """Encode a request as frames: an OPEN, with PARTs before it if it is large.

    Raises ProtocolError if it is larger than MAX_REQUEST.
    """
    payload = to_json(value)
    if len(payload) > MAX_PAYLOAD:  # UTF-8 is two or three times shorter than escapes
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        payload = text.encode("utf-8", "surrogatepass")
    return request_frames(stream, payload)


def request_frames(stream: int, payload: bytes) -> List[bytes]:
    """Cut an encoded request into frames. Raises ProtocolError if it is too large."""
    if len(payload) > MAX_REQUEST:
        raise ProtocolError("it has %d bytes, the limit is %d" % (len(payload), MAX_REQUEST))
    starts = range(0, max(len(payload), 1), MAX_PAYLOAD)
    pieces = [payload[start : start + MAX_PAYLOAD] for start in starts]
    parts = [encode(PART, stream, piece) for piece in pieces[:-1]]
    return [*parts, encode(OPEN, stream, pieces[-1])]


def to_json(value: Any) -> bytes:
    """Encode a value as JSON without blanks.

    Lone surrogates (from file names that are not UTF-8) survive as escapes.
    """
    return _encode(value).encode("ascii")


def encode_credit(stream: int, amount: int) -> bytes:
    """Encode a CREDIT frame."""
    return encode(CREDIT, stream, struct.pack(">I", amount))


def decode_json(payload: bytes, max_items: Optional[int] = None) -> Dict[str, Any]:
    """Decode a JSON object of bounded depth and of at most ``max_items`` values.

    Raises ProtocolError otherwise. The values are counted before any of them is created: a megabyte
    of small values would take thirty megabytes of memory, and hold up the event loop.
    """
    if max_items is not None and has_more_items(payload, max_items):
        raise ProtocolError("a control message holds more than %d values" % max_items)
    try:
        text = payload.decode("utf-8", "surrogatepass").strip(" \t\n\r")
        value, end = _DECODER.raw_decode(text)
        if end != len(text):
            raise ValueError("there is more than one value")
    except (ValueError, RecursionError):
        raise ProtocolError("a control message is not JSON") from None
    if not isinstance(value, dict):
        raise ProtocolError("a control message is not an object")
    if is_deeper(value, MAX_DEPTH):
        raise ProtocolError("a control message is nested too deeply")
    return value


def has_more_items(payload: bytes, most: int) -> bool:
    """Return whether a JSON text holds more values than ``most``.

    It only counts punctuation, which is cheap. If that exceeds the limit, it counts again without
    the punctuation inside of strings.
    """
    if _count_items(payload) <= most:
        return False
    plain = payload.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * most:  # each value has at most two strings: its name and itself
        return True
    return sum(map(_count_items, plain.split(b'"')[::2])) > most


def _count_items(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def decode_credit(payload: bytes) -> int:
    """Decode the payload of a CREDIT frame. Raises ProtocolError."""
    if len(payload) != 4:
        raise ProtocolError("a credit of %d bytes" % len(payload))
    return int(struct.unpack(">I", payload)[0])


def is_deeper(value: Any, most: int) -> bool:
    """Return whether lists and objects are nested deeper than ``most`` in this one.

    Do not print or encode a value that is: both take a call for each level, and may reach the
    recursion limit.
    """
    if most < 0:
        return True
    items = value.values() if isinstance(value, dict) else value
    return any(is_deeper(item, most - 1) for item in items if isinstance(item, (dict, list)))


class FrameReader:
    """Turn received bytes into frames.

    Iterate over what `feed` returns to the end. A request that came in PARTs appears as one OPEN.
    """

    def __init__(self, allowed: "frozenset[int]") -> None:
        self._allowed = allowed
        self._buffer = bytearray()
        self._parts = bytearray()
        self._parts_stream = 0

    @property
    def unfinished(self) -> int:
        """The number of bytes that have arrived since the last whole frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Tuple[int, int, bytes]]:
        """Add received bytes and yield each frame that is whole now: (type, stream, payload).

        Raises ProtocolError.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEADER.size:
                kind, stream, length = HEADER.unpack_from(buffer, start)
                if kind not in self._allowed:
                    raise ProtocolError("frame type %d is not allowed here" % kind)
                if length > MAX_PAYLOAD:
                    raise ProtocolError("a frame of %d bytes is too large" % length)
                end = start + HEADER.size + length
                if len(buffer) < end:
                    break
                payload = bytes(memoryview(buffer)[start + HEADER.size : end])
                start = end
                if kind == PART or self._parts:
                    payload = self._join_parts(kind, stream, payload)
                    if kind == PART:
                        continue
                yield kind, stream, payload
        finally:
            del buffer[:start]

    def _join_parts(self, kind: int, stream: int, payload: bytes) -> bytes:
        """Collect the parts of a request; return it once the OPEN has come.

        No other frame may come between the parts.
        """
        if kind not in (PART, OPEN) or (self._parts and stream != self._parts_stream):
            raise ProtocolError("a frame between the parts of a request")
        # Tiny parts would be read a megabyte at a time, without a turn for other streams.
        if kind == PART and len(payload) < MAX_PAYLOAD:
            raise ProtocolError("a part of a request is not full")
        self._parts_stream = stream
        self._parts += payload
        if len(self._parts) > MAX_REQUEST:
            raise ProtocolError("a request of more than %d bytes" % MAX_REQUEST)
        if kind == PART:
            return b""
        whole = bytes(self._parts)
        self._parts = bytearray()
        return whole
