"""Ray's own choice of a replica, by what Torpor knows: the order of `placing.py`, tried one after the other."""

from __future__ import annotations

from typing import Any, Final

from .passing import Order
from .placing import Standing, ranked

CLASS: Final = "SessionRouter"


def __getattr__(name: str) -> Any:
    """The class that Ray makes a router of. It is made when Ray looks it up here, because Ray is imported for it."""
    if name != CLASS:
        raise AttributeError(name)
    return _router_class()


def _router_class() -> type[Any]:
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

    class SessionRouter(RequestRouter):  # type: ignore[misc]
        """Sends a request to where its session is awake, or would be soonest."""

        async def choose_replicas(
            self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
        ) -> list[list[RunningReplica]]:
            if pending_request is None:
                return [candidate_replicas]
            pending_request.routing_context.should_backoff = True
            order = pending_request.args[0]
            assert isinstance(order, Order)
            by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
            standings = {name: Standing.told(each.routing_stats) for name, each in by_name.items()}
            lengths = {name: self.replica_queue_len_cache.get(each.replica_id) for name, each in by_name.items()}
            queued = {name: length for name, length in lengths.items() if length}
            places = ranked(standings, queued, order.wanted)
            order.why.clear()
            order.why.update({each.replica: str(each) for each in places})
            if order.at in by_name:
                return [[by_name[order.at]]]
            return [[by_name[each.replica]] for each in places]

    return SessionRouter
