"""Every bound of the HTTP server, with its unit and its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_BODY_BYTES: Final = 32 * 1024 * 1024
"""Of one request: the limit of Anthropic's API, and some eight million tokens of text."""

MAX_BODY_DEPTH: Final = 64
"""Levels of objects and arrays in a body. The schema of a tool takes the most: twenty are many."""

MAX_BODY_VALUES: Final = 262_144
"""Texts, lists, objects and commas of a body, so a bound on its values: 131,072 pairs of a name and a number, as many
as a request on the Unix socket may have."""

MIN_TOKEN_CHARS: Final = 20
"""Of a token on the loopback port: enough random characters that none is guessed."""

MAX_TOKEN_CHARS: Final = 256

MAX_TOKEN_FILE_BYTES: Final = 256 * 1024
"""Room for two thousand tokens."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of connections; an argument, so that tests need not wait for the real deadlines."""

    max_connections: int = 512
    """To each address. A client keeps several. Beyond it, the one gives way that has waited longest for its client: for
    a request, the rest of one, or until an answer is taken. If none waits, the new one gets 503."""

    max_pipelined: int = 64
    """Requests that wait on one connection behind the one in work; about 4 KiB each."""

    max_head_bytes: int = 32 * 1024
    """A request line and its headers; clients send 1 to 4 KiB. One read of the socket may add to it."""

    max_headers: int = 128

    head_timeout_s: float = 10.0
    """From the accept, or from the first byte of a further request, to the end of its headers."""

    body_timeout_s: float = 60.0
    """From the headers to the last byte of the body; a local client needs a second for 32 MiB."""

    keep_alive_s: float = 75.0
    """How long a connection may be idle between two requests."""

    max_bodies_bytes: int = 4 * MAX_BODY_BYTES
    """Bodies of all requests that are read or carried out, but for the first `free_body_bytes` of each. Beyond it, a
    body waits to be read."""

    free_body_bytes: int = 128 * 1024
    """So much of each body waits for no other: the number of connections bounds it."""

    stall_timeout_s: float = 30.0
    """The longest time in which a client takes none of the waiting bytes."""

    max_waiting_event_bytes: int = 8 * 1024 * 1024
    """Events that wait for a slow client; some 50,000 tokens."""

    first_event_s: float = 0.5
    """A stream whose request fits begins after so long, if nothing has refused it: a busy daemon does so at once."""

    silence_s: float = 10.0
    """A stream with nothing to tell sends an empty event after so long: clients give up after minutes of silence."""

    goodbye_timeout_s: float = 2.0
    """How long a stopping server waits for its clients to take their last bytes."""
