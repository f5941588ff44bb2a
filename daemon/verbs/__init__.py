"""The verbs, carried out: one handler for each record of `daemon/api` that a client may send.

All run on the event loop, and none knows of wires. Every request for a session takes its turn, so two never see it half
changed. A session that sleeps is woken by the request that needs it. What has begun to change durable state runs to its
end even if the client goes away.
"""

from . import forking, process, reading, session, store, waking
from .answering import HANDLERS

__all__ = ["HANDLERS", "forking", "process", "reading", "session", "store", "waking"]
