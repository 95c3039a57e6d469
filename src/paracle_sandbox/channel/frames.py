"""The frame format, shared by host and guest. Standard library only, Python 3.8.

A frame is a fixed header (type, stream, payload length) and a payload. Control payloads are
JSON objects, data payloads are raw bytes. The host chooses every stream number; stream 0 is
the channel itself.

    host -> guest                         guest -> host
    OPEN   {"op": name, ...}              HELLO   {...}          once, on stream 0
    DATA   bytes (stdin, file content)    DATA    bytes (stdout, file content, terminal)
    END    no more DATA                   STDERR  bytes
    SIGNAL {"kill": true} | {"signal": n} EVENT   {...}          news before the end
           | {"resize": [rows, columns]}  RESULT  {...}          the end, in good
    CREDIT u32                            ERROR   {"code", "message"}   the end, in bad
                                          CREDIT  u32

Flow control: in each direction of each stream the sender may have WINDOW payload bytes of
DATA, STDERR and EVENT under way; CREDIT gives back what the receiver has consumed. A slow
reader so stalls the writer, and memory stays bounded.
"""

import json
import struct
from json.encoder import c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]
from typing import Any, Callable, Dict, Iterator, Tuple

OPEN, DATA, STDERR, END, CREDIT, SIGNAL, EVENT, RESULT, ERROR, HELLO = range(1, 11)

HEADER = struct.Struct(">BII")
MAX_PAYLOAD = 1 << 20
WINDOW = 4 << 20
CHUNK = 256 << 10
MAX_DEPTH = 24

TO_GUEST = frozenset((OPEN, DATA, END, CREDIT, SIGNAL))
TO_HOST = frozenset((DATA, STDERR, CREDIT, EVENT, RESULT, ERROR, HELLO))
CREDITED = frozenset((DATA, STDERR, EVENT))


def _make_encoder() -> Callable[[Any], str]:
    """What json.dumps makes anew, with functions around it, for each value: a guest pays for every
    page that it writes to."""
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
    """The other side sent something that is not a frame of this protocol."""


def header(kind: int, stream: int, length: int) -> bytes:
    return HEADER.pack(kind, stream, length)


def encode(kind: int, stream: int, payload: bytes = b"") -> bytes:
    """One whole frame."""
    return HEADER.pack(kind, stream, len(checked(payload))) + payload


def checked(payload: bytes) -> bytes:
    """It fits into a frame; else ProtocolError."""
    if len(payload) > MAX_PAYLOAD:
        raise ProtocolError("a frame of %d bytes is too large" % len(payload))
    return payload


def encode_json(kind: int, stream: int, value: Dict[str, Any]) -> bytes:
    return encode(kind, stream, to_json(value))


def to_json(value: Any) -> bytes:
    """Without blanks. Lone surrogates (file names that are not UTF-8) survive as escapes."""
    return _encode(value).encode("ascii")


def encode_credit(stream: int, amount: int) -> bytes:
    return encode(CREDIT, stream, struct.pack(">I", amount))


def decode_json(payload: bytes) -> Dict[str, Any]:
    """A JSON object of bounded depth, or ProtocolError."""
    try:
        text = payload.decode("utf-8", "surrogatepass").strip(" \t\n\r")
        value, end = _DECODER.raw_decode(text)
        if end != len(text):
            raise ValueError("there is more than one value")
    except (ValueError, RecursionError):
        raise ProtocolError("a control message is not JSON") from None
    if not isinstance(value, dict):
        raise ProtocolError("a control message is not an object")
    if _too_deep(value, MAX_DEPTH):
        raise ProtocolError("a control message is nested too deeply")
    return value


def decode_credit(payload: bytes) -> int:
    if len(payload) != 4:
        raise ProtocolError("a credit of %d bytes" % len(payload))
    return int(struct.unpack(">I", payload)[0])


def _too_deep(value: Any, room: int) -> bool:
    if room < 0:
        return True
    if isinstance(value, dict):
        return any(_too_deep(item, room - 1) for item in value.values())
    if isinstance(value, list):
        return any(_too_deep(item, room - 1) for item in value)
    return False


class FrameReader:
    """Turns received bytes into frames. Feed it, then iterate."""

    def __init__(self, allowed: "frozenset[int]") -> None:
        self._allowed = allowed
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Tuple[int, int, bytes]]:
        """Every whole frame now available: (type, stream, payload)."""
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
                yield kind, stream, payload
        finally:
            del buffer[:start]
