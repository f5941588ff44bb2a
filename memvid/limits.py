"""Every bound on what is read from a file or accepted from a caller: name, unit, reason.

A limit is checked before memory is allocated or a loop begins. Raising one is a compatible change; lowering one needs a
new format version, for a valid bundle must stay valid.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# --- bundles

MAX_TOKENS: Final = 16 * MIB
"""Tokens of one session. Sixteen times the longest context that any model is sold with."""

MAX_BLOCKS: Final = 128 * KIB
"""Lines of a block list: MAX_TOKENS in spans of 256, and as many whole-state records."""

MAX_RECORDS_AT_ONE_POSITION: Final = 1
"""State records between two spans. A position has one state; more would cost the reader milliseconds each."""

MAX_MANIFEST_BYTES: Final = 16 * MIB
"""A manifest with MAX_BLOCKS lines of 56 bytes and the largest session map fits."""

MAX_FRAMES: Final = 2 * MAX_BLOCKS
"""Frames in one file: those of its own manifest, and as many that it holds for others."""

MAX_DIRECTORY_BYTES: Final = 20 * MIB
"""A directory with MAX_FRAMES lines of 56 bytes fits, and what format 1 had beside them."""

MAX_SESSION_MAP_BYTES: Final = 4 * MIB
"""Packed size of what the layers above keep with a session. Bulk belongs in blocks."""

MAX_ENVIRONMENT_ENTRIES: Final = 64
MAX_ENVIRONMENT_CHARS: Final = 1024
"""Length of one key or value; it is information for people."""

MAX_BUNDLE_BYTES: Final = 1 << 50
"""One bundle file, 1 PiB: keeps every offset sum far below 2^63, which SQLite and off_t can hold."""

MAX_VERSION: Final = (1 << 53) - 1
"""Versions are counted from 1; 2^53 - 1 survives JSON readers."""

MAX_IMPORTED_VERSION: Final = 1 << 32
"""The largest version number that an import keeps. A larger one is no count of sleeps, and would leave its session few
numbers to sleep as: such a bundle becomes the store's next version."""

# --- blocks

MAX_BLOCK_HEADER_BYTES: Final = 512 * KIB
"""Canonical block header: 256 tokens and MAX_SLOTS slots of ordinary names fit."""

MAX_REMEMBERED_HEAD_BYTES: Final = 8 * MIB
"""Checked frame heads that one reader remembers, as they lie in files; unpacked they take three to six times as much.
Others are read and checked again each time: it takes millions of tokens to get there."""

MAX_SLOTS: Final = 4096
"""Slots of one block: K and V of a thousand layers, twice."""

MAX_SLOT_DIMS: Final = 8
MAX_DIM: Final = 1 << 32
"""One dimension of a slot's shape."""

MAX_SLOT_BYTES: Final = 4 * GIB
"""Raw bytes of one slot. A recurrent state of the largest open models is under 1 GiB."""

MAX_TENSOR_SLOT_BYTES: Final = 1 * GIB
"""Of a slot that is written as a tensor; it is held in memory whole."""

MAX_TENSOR_HEADER_BYTES: Final = 100_000_000
"""Of a `.safetensors` file: what the format's own reader takes."""

MAX_FRAME_BYTES: Final = 1 << 44
"""One block's frame: MAX_SLOTS x MAX_SLOT_BYTES."""

MAX_SLOT_NAME_CHARS: Final = 64
MAX_SLOT_KIND_CHARS: Final = 64

# --- identity

MAX_IDENTITY_PARTS: Final = 64
MAX_IDENTITY_NAME_CHARS: Final = 128
MAX_IDENTITY_VALUE_BYTES: Final = 4 * KIB
"""Values are digests and short settings; a value of many KiB is a mistake."""

# --- remotes

MAX_PLACES_BYTES: Final = 20 * MIB
"""The places of a version: MAX_BLOCKS lines of 56 bytes, and as many packs fit."""

MAX_SENT_PACK_BYTES: Final = 256 * MIB
"""Raw bytes of the blocks in a pack for a remote, unless its first one alone has more. What was cut off goes on at the
pack."""

MAX_FETCHED_FRAME_BYTES: Final = 1 * GIB
"""One frame from a remote, which is in memory whole for a moment."""

MAX_HEAD_BYTES: Final = 256 * KIB
"""The head of a session: MAX_HEAD_VERSIONS take half of it, MAX_TAIL_SEGMENTS less than the other half."""

MAX_HEAD_VERSIONS: Final = 4096
"""Versions that a remote keeps of one session."""

MAX_TAIL_SEGMENTS: Final = 256
MAX_TAIL_KEY_CHARS: Final = 400
"""Segments of a journal behind the newest version, and the length of a key of one."""

MAX_LEASE_S: Final = 3600
"""Seconds of a lease: whoever has died holds his sessions for so long at most."""

MAX_MACHINE_CHARS: Final = 255
"""The name of a machine, for people; POSIX's limit for a host's."""

MAX_SEEN_HEADS: Final = 16 * KIB
"""Heads of which a store remembers how new they were: 1.5 MiB at most."""

REMOTE_GRACE_S: Final = 3600
"""Seconds for which a pack of a remote stays, once it was said that it leaves, and its name is not used behind that. In
a quarter of it an upload changes a head that relies on what it has seen there; the rest is for answers that come late
and listings that are old. An upload may take longer: it looks again before it changes anything."""

MAX_LEAVING: Final = 16 * KIB
MAX_LEAVING_BYTES: Final = 2 * MIB
"""Packs of a remote that leave at once, and the object that lists them: 90 bytes for each. Others leave once these have
left."""

MAX_LISTED: Final = 4 * MIB
"""Objects of one kind in a remote, as of a listing: one that has no end would take all memory."""

# --- names

MAX_NAME_CHARS: Final = 128
"""Of a namespace, and of a name: leaves room in a listing, and in a file name if ever one is made of it."""

MAX_TAG_CHARS: Final = 64
MIN_ID_DIGITS: Final = 8
"""Fewest hex digits of a shortened bundle id. 32 bits tell a session's versions apart; else the reference is refused
with those that match."""

# --- tags, pins and retention

MAX_MARKS: Final = 16 * KIB
"""Tags and pins of one store. People set them by hand; a program that tags each sleep should use labels."""

MAX_STRIPS: Final = 32 * KIB
"""Stripped versions of one store."""

MAX_MARKS_BYTES: Final = 30 * MIB
"""The file with MAX_MARKS marks and MAX_STRIPS strips, each of another session of the longest name: 521 bytes each."""

MAX_MARKS_NODES: Final = 8 * (MAX_MARKS + MAX_STRIPS)
"""Brackets and commas in that file, counted before it is parsed; each value takes one. MAX_MARKS marks in as many
sessions take 7 each; 384 Ki values take 42 MiB at most once built."""

MAX_KEEP_DAYS: Final = 36_500
"""A retention in days: a hundred years, far inside what 64 bits of nanoseconds hold."""

# --- msgpack

MAX_DEPTH: Final = 32
"""Nesting of maps and lists. Ours use 4; the session map of other layers may use more."""

MAX_UNSCANNED_BYTES: Final = 64 * KIB
"""Packed data up to this size may be unpacked at once: a value takes a byte at least and 100 bytes once built, so it
takes 7 MiB at most."""

MAX_CLAIMED_ELEMENTS: Final = 2 * MIB
"""Elements that the containers of a document may claim together. Unpacking sets 8 bytes aside for each before it knows
whether it is there, so a document that could claim more is walked first."""

MAX_NODES: Final = 128 * KIB
"""Values in one packed document above that size, counted before it is unpacked: 14 MiB once built. The largest block
header has half as many, a manifest a few dozen and those of the session map."""

# --- codecs

MAX_ZSTD_WINDOW_BYTES: Final = 8 * MIB
"""Memory that a decoder holds for one frame."""

MAX_EXPANSION: Final = 256
"""Raw bytes in one stored byte of a slot; a writer stores raw what would shrink further. KV shrinks to two thirds, and
only constants come near this. So the length of a file from outside shows whether it is a bomb."""

MAX_SMALL_BUNDLE_BYTES: Final = 64 * MIB
"""Raw bytes that even the smallest file from outside may hold: they are read in a tenth of a second."""

MIN_PLANE_CHUNK_BYTES: Final = 64 * KIB
"""Fewest raw bytes that are split into byte planes at once; the most is CHUNK_BYTES. Bounds the table of planes: 2 MiB
for a slot of MAX_SLOT_BYTES in elements of 8 bytes."""

# --- small files and input/output

MAX_INDEX_BYTES: Final = 512 * MIB
"""An index file, or its log, that an opening reads; a larger one is made anew from the bundles. A version takes 290 to
670 bytes, so this is 0.8 million versions at least."""

MAX_NOTE_BYTES: Final = 16 * MIB
"""The note of a version without a file: MAX_FRAMES take 4 MiB in it, and MAX_BLOCKS holders 8 MiB."""

MAX_NOTE_NODES: Final = 128 * KIB
"""Brackets and commas in it, as in MAX_MARKS_NODES: two dozen, and those of MAX_LABELS labels of nothing else."""

MAX_JOURNAL_RECORD_BYTES: Final = MAX_SESSION_MAP_BYTES + 512 * KIB
"""One record of the journal: the largest session map, and an identity. A session whose acknowledged turns take more is
put to sleep instead."""

MAX_JOURNAL_BYTES: Final = 1 * GIB
"""The journal. It is written anew when most of it is covered by sleeps; a larger one is not read."""

MAX_STORE_JSON_BYTES: Final = 4 * KIB
MAX_STORE_JSON_NODES: Final = 64
MAX_LABELS: Final = 256
MAX_LABEL_CHARS: Final = 256
MAX_IOVECS: Final = 512
"""Buffers in one readv or writev. POSIX systems take 1024; half leaves room and costs nothing."""

PROVEN_BEHIND_BYTES: Final = 16 * MIB
"""Of a pack: so much of it is flushed and read back while the rest is written, one time after the other."""

CHUNK_BYTES: Final = 1 * MIB
"""Step of streamed hashing and decompression: larger gains nothing, smaller costs calls."""

MAX_OPEN_ANCESTORS: Final = 48
"""Ancestor bundles that one reader keeps open at a time; macOS starts a process with 256 descriptors."""
