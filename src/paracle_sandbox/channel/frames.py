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
    PART   a piece of the next OPEN       CREDIT  u32

Flow control: in each direction of each stream the sender may have WINDOW payload bytes of
DATA, STDERR and EVENT under way; CREDIT gives back what the receiver has consumed. A slow
reader so stalls the writer, and memory stays bounded.

A request that is larger than a frame travels as PARTs, which are full, with its end in the OPEN: a
program may have two megabytes of arguments and environment.
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
# What a guest may say at once: an answer is a few values, a part of a listing holds files by the
# hundred.
MAX_ANSWER_ITEMS = 1000
MAX_EVENT_ITEMS = 2000
# The kernel takes no more arguments than these, however short each is.
MAX_REQUEST_ITEMS = 300_000

TO_GUEST = frozenset((OPEN, DATA, END, CREDIT, SIGNAL, PART))
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


def encode_request(stream: int, value: Dict[str, Any]) -> List[bytes]:
    """The frames of a request: OPEN, and PARTs before it where there is much of it. ProtocolError
    for more than MAX_REQUEST."""
    payload = to_json(value)
    if len(payload) > MAX_PAYLOAD:  # not with escapes, which are twice or thrice the text's bytes
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        payload = text.encode("utf-8", "surrogatepass")
    return request_frames(stream, payload)


def request_frames(stream: int, payload: bytes) -> List[bytes]:
    if len(payload) > MAX_REQUEST:
        raise ProtocolError("a request of %d bytes, of at most %d" % (len(payload), MAX_REQUEST))
    starts = range(0, max(len(payload), 1), MAX_PAYLOAD)
    pieces = [payload[start : start + MAX_PAYLOAD] for start in starts]
    parts = [encode(PART, stream, piece) for piece in pieces[:-1]]
    return [*parts, encode(OPEN, stream, pieces[-1])]


def to_json(value: Any) -> bytes:
    """Without blanks. Lone surrogates (file names that are not UTF-8) survive as escapes."""
    return _encode(value).encode("ascii")


def encode_credit(stream: int, amount: int) -> bytes:
    return encode(CREDIT, stream, struct.pack(">I", amount))


def decode_json(payload: bytes, max_items: Optional[int] = None) -> Dict[str, Any]:
    """A JSON object of bounded depth and of ``max_items`` values, or ProtocolError.

    Values are counted before any is made: a megabyte of small ones takes thirty times its size of
    memory, and the event loop's time from everybody else.
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
    """Whether a JSON text holds more values than ``most``. Only counts bytes, so that it costs
    hardly anything; the punctuation inside of texts is left out where it matters."""
    if _count_items(payload) <= most:
        return False
    plain = payload.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * most:  # at most a name and a text for each
        return True
    return sum(map(_count_items, plain.split(b'"')[::2])) > most


def _count_items(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def decode_credit(payload: bytes) -> int:
    if len(payload) != 4:
        raise ProtocolError("a credit of %d bytes" % len(payload))
    return int(struct.unpack(">I", payload)[0])


def is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects lie more than ``most`` deep in this one. What is, is for nobody to
    print or write: that takes a call for each level, and its reader may have few left."""
    if most < 0:
        return True
    items = value.values() if isinstance(value, dict) else value
    return any(is_deeper(item, most - 1) for item in items if isinstance(item, (dict, list)))


class FrameReader:
    """Turns received bytes into frames. Feed it, then iterate. A request that came in PARTs is one
    OPEN."""

    def __init__(self, allowed: "frozenset[int]") -> None:
        self._allowed = allowed
        self._buffer = bytearray()
        self._parts = bytearray()
        self._parts_stream = 0

    @property
    def unfinished(self) -> int:
        """Bytes that it was fed since the last whole frame."""
        return len(self._buffer)

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
                if kind == PART or self._parts:
                    payload = self._joined(kind, stream, payload)
                    if kind == PART:
                        continue
                yield kind, stream, payload
        finally:
            del buffer[:start]

    def _joined(self, kind: int, stream: int, payload: bytes) -> bytes:
        """The whole request once it is there. Nothing comes between its parts."""
        if kind not in (PART, OPEN) or (self._parts and stream != self._parts_stream):
            raise ProtocolError("a request that was begun and not ended")
        # A megabyte of tiny ones would be gone through without a turn for others.
        if kind == PART and len(payload) < MAX_PAYLOAD:
            raise ProtocolError("a part of a request that is not full")
        self._parts_stream = stream
        self._parts += payload
        if len(self._parts) > MAX_REQUEST:
            raise ProtocolError("a request of more than %d bytes" % MAX_REQUEST)
        if kind == PART:
            return b""
        whole = bytes(self._parts)
        self._parts = bytearray()
        return whole
