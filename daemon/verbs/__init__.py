"""The verbs, carried out: one handler for each record of `daemon/api` that a client may send.

All run on the event loop. Requests for a session take turns, so none sees it half changed. A request that needs a
sleeping session wakes it. A change of durable state that has begun runs to its end, even if the client leaves.
"""

from . import (  # noqa: F401
    blocks,
    branching,
    contents,
    conversing,
    difference,
    forking,
    history,
    process,
    reading,
    recalling,
    remote,
    session,
    store,
    waking,
)
from .answering import HANDLERS as HANDLERS
