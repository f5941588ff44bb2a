"""The bounds of requests and answers, each with its unit and reason, and words that verbs and options share. Imports
nothing."""

from __future__ import annotations

from typing import Final

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
"""A session URI has at most 267. The daemon checks names; this only bounds the text that it gets."""

MAX_MODEL_CHARS: Final = 256
MAX_LABELS: Final = 64
MAX_LABEL_CHARS: Final = 256
MAX_KIND_CHARS: Final = 64
MAX_TAG_CHARS: Final = 256
"""A tag has at most 64. The daemon checks tags; this only bounds the text that it gets."""

MAX_PAGE_TOKENS: Final = 65_536
"""Of a ledger, told at once: some 300 kB of text."""

MAX_NAMED_SESSIONS: Final = 1024
"""In one request; for more, use a label."""

MAX_HISTORY: Final = 10_000
"""Versions in one answer: a few megabytes, and a second or two of work."""

DEFAULT_HISTORY: Final = 50
"""More than a screen has lines."""

MAX_EVENT_NAMES: Final = 256
MAX_EVENT_NAME_CHARS: Final = 64
"""There are fewer and shorter ones; a refusal lists them."""

MAX_DAYS: Final = 36_500
"""The greatest age: a hundred years."""

MAX_MESSAGES: Final = 16_384
"""Messages of one transcript: some ten thousand turns of an agent with its tools."""

MAX_TOOLS: Final = 512
MAX_TOOL_NAME_CHARS: Final = 256
MAX_CALLS: Final = 128
"""Of one message."""

MAX_CALL_ID_CHARS: Final = 512
MAX_ARGUMENTS_CHARS: Final = 1024 * 1024
"""As JSON: the arguments of one call, the schema of one tool."""

MAX_ROOT_CHARS: Final = 512 * 1024
"""As JSON: the tools and template arguments of a conversation, which each version keeps. A coding agent has 100,000."""

MAX_JSON_DEPTH: Final = 32
"""Of arguments and schemas."""

MAX_SCHEMA_CHARS: Final = 64 * 1024
"""Of a schema that an answer must match, and of the schemas of all tools that an answer must call one of, without their
descriptions. The worst takes 2 s to compile."""

MAX_GRAMMAR_CHARS: Final = 16 * 1024
"""Of a regular expression or a grammar. The worst takes 1 s to compile, and 10 MB of the stack."""

MAX_TOP_LOGPROBS: Final = 20
MAX_LIKELIHOODS: Final = 350_000
"""Of an answer with log-probabilities: its tokens, and those told beside them. Some 20 MB as a result."""

MAX_BRANCHES: Final = 1024
"""Of one tree, and so of one request."""

MAX_CHILDREN: Final = MAX_BRANCHES - 1
"""That one request forks: their parent is in the tree, too."""

MAX_LOGITS_BYTES: Final = 48 * 1024 * 1024
"""Of an answer of `produce`: three quarters of a reply."""

MAX_STEERED: Final = 4096
"""Tokens that a branch is steered to or from."""

MAX_LOGIT_BIASES: Final = 300
"""Of a sampling, as OpenAI's API has it: 120 kB of memory, and 8 kB of each version and record of a turn."""

MAX_BIAS: Final = 1000.0
"""Of a logit, up or down: far more than logits differ."""

MAX_CHECKPOINTS: Final = 4
"""Of one request: as many marks for a cache as an API takes. Each costs a rendering of the messages before it."""

MAX_KEEP_AWAKE_S: Final = 86_400
"""A day."""

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
