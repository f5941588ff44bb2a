"""What each figure of `status` says, for `/metrics`: a sentence for each gauge, by its name without `torpor_`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

SENTENCES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model_parameters": "Parameters of the model.",
        "model_resident": "1 while the model is loaded, else 0.",
        "model_context_tokens": "Tokens that the context of the model holds.",
        "model_loading": "1 while the model is being loaded, else 0.",
        "model_pinned": "1 where the model stays in memory also without use, else 0.",
        "model_ttl_s": "Seconds without use after which the model is unloaded.",
        "model_weights_bytes": "Bytes of memory that the model takes now, without sessions.",
        "model_sessions_awake": "Awake sessions of the model.",
        "model_loads": "Loads of the model since the daemon began.",
        "model_idle_s": "Seconds since the last use of the model.",
        "sessions_awake": "Sessions whose state is in memory.",
        "sessions_asleep": "Sessions whose state is on disk alone.",
        "memory_budget_bytes": "Bytes of memory that models and sessions may take.",
        "memory_weights_bytes": "Bytes of memory that the loaded models take.",
        "memory_sessions_bytes": "Bytes of memory of the awake sessions, as of their last requests.",
        "memory_reserved_bytes": "Further bytes of memory that running requests may take.",
        "memory_waiting": "Requests that wait for memory.",
        "memory_slept_by_pressure": "Sleeps since the daemon began that made room for other sessions.",
        "memory_slept_by_idling": "Sleeps since the daemon began that followed disuse.",
        "memory_branches_bytes": "Bytes of memory of the branches of all trees.",
        "uptime_s": "Seconds since the daemon began.",
        "queue_waiting": "Requests that wait for their turn, for memory or for the engine.",
        "queue_background": "Waiting requests that stand back behind the others.",
        "queue_limit": "Requests that may wait before others are refused.",
        "prefix_hits": "New sessions since the daemon began that took over the beginning of another one.",
        "prefix_misses": "New sessions since the daemon began that found no beginning to take over.",
        "cached_tokens": "Tokens since the daemon began that new sessions took over and did not read.",
        "batched_tokens": "Tokens since the daemon began that several sessions wrote in one call of a model.",
        "scrub_bytes_per_s": "Bytes of the store that the scrub may read in a second while no request runs.",
        "scrub_sessions": "Sessions that the scrub has read since the daemon began.",
        "scrub_bytes_read": "Bytes that the scrub has read since the daemon began.",
        "scrub_damaged": "Sessions in which the scrub has found damage since the daemon began.",
        "scrub_healed": "Damaged sessions that were computed again since the daemon began.",
        "scrub_unhealed": "Damaged sessions that could not be computed again since the daemon began.",
        "scrub_last_ns": "When the scrub last read a session, in nanoseconds of Unix time.",
        "config_reloads": "How often the configuration file was applied since the daemon began.",
        "disk_free_bytes": "Free bytes for this user on the disk of the store.",
        "disk_total_bytes": "Bytes of the disk of the store.",
        "disk_store_budget_bytes": "Bytes that the store may take.",
        "disk_daily_write_budget_bytes": "Bytes that may be written to the store in a day.",
        "disk_keep_free_bytes": "Bytes of the disk that no sleep may take.",
        "disk_coins_logical_bytes": "Bytes of the raw state of all versions of all sessions.",
        "disk_coins_stored_bytes": "Bytes of the disk that sessions need: shared and alone together.",
        "disk_coins_shared_bytes": "Bytes of the disk that several sessions need, counted once.",
        "disk_coins_alone_bytes": "Bytes of the disk that one session alone needs, which are freed if it goes.",
        "disk_coins_rest_bytes": "Bytes of the store that no session needs, and of its other files.",
        "disk_coins_counted_ns": "When the coins of the store were counted, in nanoseconds of Unix time.",
        "disk_held_bytes": "Bytes of manifests and packs, which the budget of the store bounds.",
        "remote_bytes_sent": "Bytes that were sent to the remote since midnight UTC.",
        "remote_requests": "Requests to the remote since midnight UTC.",
        "remote_dollars": "What list prices say of what was used of the remote since midnight UTC.",
        "remote_waiting": "Sessions of which nothing is sent to the remote before the next day.",
    }
)
