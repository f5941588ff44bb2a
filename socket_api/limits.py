"""Every bound that the wire keeps, with its unit and its reason.

Owns the limits of frames and connections; `daemon/api/limits.py` owns those of requests. `docs/reference/protocol.md`
lists them all, for other clients.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..daemon.api.limits import MAX_APPENDED_TOKENS

PROTOCOL_VERSION = 1
"""Raised by any change that an older peer would misread; not the version of the package."""

MAX_REQUEST_FRAME_BYTES = 16 * 1024 * 1024
"""Client to server: the text of some four million tokens, far beyond any context."""

MAX_REPLY_FRAME_BYTES = 64 * 1024 * 1024
"""Server to client: about 850,000 generated tokens with one logits digest each."""

MAX_FRAME_BYTES_AT_ONCE = 16 * 1024
"""A larger request is decoded and checked in pieces, so that no stream waits: this size takes some milliseconds at
most."""

MAX_DEPTH = 48
"""Levels of maps and arrays in a frame: a schema or an argument of a tool may have 32."""

MAX_ARRAY_ITEMS = MAX_APPENDED_TOKENS
"""Items of one array, and integers of one frame: one token list of the longest context in use."""

MAX_REQUEST_VALUES = 131_072
"""Values of a request outside runs of integers; bounds the memory of a decoded frame (docs/reference/protocol.md)."""

MAX_REPLY_VALUES = 4 * 1_048_576
"""Values of a reply, as above: a digest for each generated token is a value of its own."""

MAX_REQUEST_ID = 2**63 - 1
MAX_CLIENT_NAME_CHARS = 256

MAX_ERROR_MESSAGE_CHARS = 4096
MAX_ERROR_FRAME_BYTES = 256 * 1024
"""An error whose frame would be larger goes without its details, so that a failure always arrives."""


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The limits of one direction of the wire."""

    max_frame_bytes: int
    max_values: int


REQUEST_LIMITS = FrameLimits(MAX_REQUEST_FRAME_BYTES, MAX_REQUEST_VALUES)
REPLY_LIMITS = FrameLimits(MAX_REPLY_FRAME_BYTES, MAX_REPLY_VALUES)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of the server; an argument, so that tests need not wait for the real deadlines."""

    max_connections: int = 2048
    """For a thousand agents, twice. Beyond it, the longest idle one gives way. Fewer if the daemon may open fewer files
    (`descriptors.py`)."""

    reserved_connections: int = 8
    """More connections while all those work: they take only `status` and `shutdown`."""

    max_in_flight: int = 32
    """Requests of one connection. One engine serves them all, so more would only queue."""

    hello_timeout_s: float = 10.0
    """From accept to a complete hello."""

    slow_frame_s: float = 1.0
    """While others wait for room, a frame slower than `min_frame_bytes` in this time is given up."""

    min_frame_bytes: int = 256 * 1024

    frame_timeout_s: float = 30.0
    """From a frame's first byte to its last; a local peer needs milliseconds for 16 MiB."""

    stall_timeout_s: float = 30.0
    """The longest time in which a client takes none of the waiting bytes."""

    max_connection_request_bytes: int = MAX_REQUEST_FRAME_BYTES + 1024 * 1024
    """Requests of one connection, being read or carried out: one of the largest size, and some small ones."""

    max_request_bytes: int = 128 * 1024 * 1024
    """Requests of all connections."""

    uncounted_frame_bytes: int = 1024
    """A request up to this size never waits for room, so that a cancel gets through: 2,056 connections with 32 such
    requests each hold 65 MiB."""

    max_waiting_event_bytes: int = 8 * 1024 * 1024
    """Events that wait for a slow client; some 100,000 tokens."""

    max_waiting_notice_bytes: int = 64 * 1024
    """Above this, the daemon's own events wait elsewhere (`bus.py`), and may be dropped."""

    max_waiting_reply_bytes: int = MAX_REPLY_FRAME_BYTES
    """Results that wait for a slow client; the next one is not encoded until there is room."""

    goodbye_timeout_s: float = 2.0
    """How long a stopping server waits for a client to take its last messages."""
