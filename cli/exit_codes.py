"""The one table that turns an error code into an exit status.

Scripts depend on it: a status keeps its meaning for ever. A code that the table does not know is a plain error (1).
`docs/reference/errors.md` and `torpor help exit-status` show the same table. One test compares them, another checks
that every error class of every layer stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """One exit status: its number, its short name, and its meaning for a script."""

    number: int
    name: str
    meaning: str


OK = ExitStatus(0, "ok", "it worked")
ERROR = ExitStatus(1, "error", "it failed for a reason without a status of its own")
USAGE = ExitStatus(2, "usage", "the command line, a parameter or a request is not valid")
PARTIAL = ExitStatus(3, "partial", "done for some of the sessions named, not for all")
NOT_FOUND = ExitStatus(4, "not found", "no such session, version or model")
INTEGRITY = ExitStatus(6, "integrity", "stored bytes are not those written, or the demo disproved it")
INCOMPATIBLE = ExitStatus(7, "incompatible", "another model, or a format that this version does not read")
BUSY = ExitStatus(8, "busy", "it is in use or at its limit; try again later")
NO_SPACE = ExitStatus(9, "no space", "no room on disk, in memory or in the budget; nothing changed")
NO_STORE = ExitStatus(10, "no store", "there is no store at that path")
LOCKED = ExitStatus(11, "locked", "another daemon owns the store or the socket")
UNREACHABLE = ExitStatus(12, "unreachable", "no daemon answers on the socket, or none could be started")
NOT_INSTALLED = ExitStatus(13, "not installed", "the agent to launch is not installed")
INTERRUPTED = ExitStatus(130, "interrupted", "Ctrl-C; the session is at its last committed token")

STATUSES: tuple[ExitStatus, ...] = (
    OK, ERROR, USAGE, PARTIAL, NOT_FOUND, INTEGRITY, INCOMPATIBLE, BUSY, NO_SPACE, NO_STORE, LOCKED, UNREACHABLE,
    NOT_INSTALLED, INTERRUPTED,
)  # fmt: skip

_CODES: tuple[tuple[ExitStatus, tuple[str, ...]], ...] = (
    (
        ERROR,
        (
            "error", "api_error", "cli_error", "daemon_error", "snapshot_error", "store_error",
            "client_closed", "daemon_start_failed", "demo_daemon_failed", "demo_unfit", "doctor_failed",
            "duplicate_id", "durability_lost", "extra_missing",
            "frame_timeout", "frame_too_large", "generation_failed", "hello_timeout", "http_refused",
            "inconsistent_state", "index_failed", "logits_lent", "stale_logits",
            "internal_error", "invalid_draft", "journal_waits", "limit_exceeded", "local_protocol_error", "lock_lost",
            "malformed_frame", "malformed_message", "no_home", "not_enough_memory", "output_failed", "peer_refused",
            "diverged", "protocol_error", "remote_error", "remote_refused", "remote_too_large", "remote_unclear",
            "remote_unfit", "remote_unreachable", "reply_too_large", "store_closed", "store_io", "store_read_only",
            "system_error", "truncated_frame",
            "too_few_descriptors", "unsafe_path", "unsafe_socket_path", "unsafe_token_file",
        ),
    ),
    (
        USAGE,
        (
            "branch_has_children", "context_overflow", "empty_context", "invalid_branches", "invalid_configuration",
            "invalid_fold", "invalid_request",
            "invalid_constraint", "invalid_logits", "invalid_sampling", "invalid_tokens",
            "invalid_policy", "invalid_remote", "invalid_tag", "invalid_transcript", "invalid_uri", "invalid_usage",
            "name_taken", "no_remote", "remote_key_wrong",
            "no_target_folder",
            "nothing_to_do", "session_exists", "socket_path_too_long", "stale_step", "tag_taken", "target_exists",
            "target_in_store", "transcript_diverged", "unknown_event", "unknown_method", "unreadable_input",
        ),
    ),
    (PARTIAL, ("stop_incomplete", "stop_refused")),
    (
        NOT_FOUND,
        (
            "adapter_files_missing", "adapter_unavailable", "ambiguous_version", "answer_not_found", "branch_not_found",
            "mark_not_found",
            "model_files_missing", "model_not_loaded", "model_unavailable", "no_such_position",
            "nothing_named", "previous_response_not_found", "session_not_found", "unknown_model",
        ),
    ),
    (
        INTEGRITY,
        (
            "block_missing", "bundle_mismatch", "bundle_missing", "canary_failed", "corrupt_block", "corrupt_bundle",
            "corrupt_head", "corrupt_journal", "corrupt_marks", "corrupt_object", "corrupt_store_file", "corruption",
            "demo_disproved", "head_replayed", "index_mismatch",
            "malformed_snapshot", "marks_lost", "non_finite_state", "not_recomputable",
            "owner_mismatch", "parent_mismatch",
            "read_back_failed", "trailing_data", "truncated", "version_mismatch",
        ),
    ),
    (
        INCOMPATIBLE,
        (
            "adapter_mismatch", "context_too_short", "identity_mismatch", "layout_mismatch", "model_changed",
            "not_tensors",
            "template_unusable", "unsupported_cache", "unsupported_format", "unsupported_protocol",
        ),
    ),
    (
        BUSY,
        (
            "client_busy", "connection_evicted", "daemon_busy", "daemon_still_running", "engine_busy", "lease_held",
            "lease_lost", "memory_busy",
            "model_in_use",
            "model_files_changing",
            "request_timeout", "service_closed", "session_awake", "session_busy", "shutting_down", "stop_deadline",
            "store_busy", "too_many_branches", "too_many_connections", "too_many_requests", "too_many_subscribers",
        ),
    ),
    (NO_SPACE, ("budget_exceeded", "memory_budget_exceeded", "no_space")),
    (NO_STORE, ("no_store", "not_a_store")),
    (LOCKED, ("port_in_use", "socket_in_use", "store_locked")),
    (UNREACHABLE, ("connection_lost", "daemon_not_started", "daemon_unreachable", "http_not_served", "replica_lost")),
    (NOT_INSTALLED, ("agent_missing",)),
    (INTERRUPTED, ("cancelled",)),
)  # fmt: skip

STATUS_OF_CODE: Mapping[str, ExitStatus] = MappingProxyType(
    {code: status for status, codes in _CODES for code in codes}
)


def exit_status_of(code: str) -> int:
    """Give the exit status of an error code; a code that the table does not know is a plain error."""
    return STATUS_OF_CODE.get(code, ERROR).number


def describe_exit_codes() -> str:
    """Write the statuses as lines of text, one each, for `torpor help exit-status`."""
    return "\n".join(f"{status.number:>3}  {status.name}: {status.meaning}" for status in STATUSES)
