"""The bounds of what a verb is asked and answers, each with its unit and its reason, and words that verbs and options
have. Imports nothing."""

from __future__ import annotations

from typing import Final, Literal

MAX_NUMBER: Final = 2**63 - 1
"""Of versions, positions and counts."""

MAX_TEXT_CHARS: Final = 16 * 1024 * 1024
"""One text: as many characters as a request on the wire may have bytes."""

MAX_APPENDED_TOKENS: Final = 1_048_576
"""In one request: one token list of the longest context in use."""

MAX_GENERATED_TOKENS: Final = 1_000_000
MAX_TOKEN_ID: Final = 2**32 - 1
MAX_SEED: Final = 2**64 - 1

MAX_SESSION_CHARS: Final = 512
"""A session URI has at most 267; the daemon says what is wrong with a name, so this only bounds what it is shown."""

MAX_MODEL_CHARS: Final = 256
MAX_LABELS: Final = 64
MAX_LABEL_CHARS: Final = 256
MAX_KIND_CHARS: Final = 64
MAX_TAG_CHARS: Final = 256
"""A tag has at most 64; the daemon says what is wrong with one, so this only bounds what it is shown."""

MAX_NAMED_SESSIONS: Final = 1024
"""In one request; more of them have a label."""

MAX_EVENT_NAMES: Final = 256
MAX_EVENT_NAME_CHARS: Final = 64
"""There are fewer and shorter ones; the daemon says which it knows."""

MAX_DAYS: Final = 36_500
"""Ages that may be asked for: a hundred years."""

MAX_MESSAGES: Final = 16_384
"""Messages of one transcript: what the daemon keeps marks of. Some ten thousand turns of an agent with its tools."""

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256


RecomputePolicy = Literal["off", "exact", "fastest"]
"""Whether a wake computes tokens again where that is faster: never, where the very bits result, or always."""
