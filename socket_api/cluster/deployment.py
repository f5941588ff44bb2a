"""The application that Ray Serve runs: a door, and the replicas behind it.

`application` is also what a configuration of Ray Serve names (`import_path:
torpor.socket_api.cluster.deployment:application`), with the options of `torpor serve` as its `args`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Final

from ...daemon.options.configuration import Configuration, read_configuration
from ...daemon.options.serve_options import CLUSTER_OPTIONS, SERVE_OPTIONS
from ..errors import ReplicaLost
from ..tokens import default_tokens_path
from . import router, scaling
from .passing import Order

STANDING_PERIOD_S: Final = 1.0
"""How often a replica tells routers what it has."""

_IN_WORK: Final = 4096
"""Requests that one replica is given at a time. It has bounds of its own, and an answer for what exceeds them."""


DEFAULTS: Final[Mapping[str, Any]] = {
    "remote_lease": 5.0,
    "remote_turns": 0.0,
    "stop_within": SERVE_OPTIONS["stop_within"].default,
}
"""Others than those of one daemon: a turn that was told is to survive its replica, and to be elsewhere soon."""


def application(args: Mapping[str, Any]) -> Any:
    """Ray Serve's application. args: the options of `torpor serve` by their names, of which `remote` and `store`, the
    folder for all stores of a machine, are needed; `replicas` and `most_replicas`; `tokens`, the file of tokens, by
    default the user's. What they leave out, a file of `config` says. Ray waits for a replica that is to go twice as
    long as `stop_within`.

    Raises ImportError: Ray is not installed."""
    from ray import serve

    file = Configuration() if args.get("config") is None else read_configuration(Path(args["config"]))
    said = {name: file.options[name] for name in DEFAULTS if name in file.options}
    given = {**DEFAULTS, **said, **args}
    stop_within = given["stop_within"]
    fewest, most = (given.pop(name, None) or file.cluster.get(name) for name in ("replicas", "most_replicas"))
    tokens = given.pop("tokens", None) or default_tokens_path()
    replica = serve.deployment(
        name="replica",
        **_size(fewest or CLUSTER_OPTIONS["replicas"].default, most),
        max_ongoing_requests=_IN_WORK,
        graceful_shutdown_timeout_s=2 * stop_within,
        max_constructor_retry_count=3,
        request_router_config={
            "request_router_class": f"{router.__name__}.{router.CLASS}",
            "request_routing_stats_period_s": STANDING_PERIOD_S,
        },
    )(ServedReplica)
    door = serve.deployment(name="door", max_ongoing_requests=_IN_WORK, ray_actor_options={"num_cpus": 0})(
        serve.ingress()(ServedDoor)
    )
    return door.bind(replica.bind(given, tokens), tokens)


def _size(fewest: int, most: int | None) -> dict[str, Any]:
    """How many replicas Ray keeps."""
    if most is None:
        return {"num_replicas": fewest}
    policy = {"policy_function": f"{scaling.__name__}:{scaling.wanted_by_ray.__name__}"}
    return {"autoscaling_config": {"min_replicas": fewest, "max_replicas": most, "policy": policy}}


class ServedReplica:
    """A replica as Ray starts, asks and ends it."""

    async def __init__(self, given: Mapping[str, Any], tokens: Path) -> None:  # type: ignore[misc]  # Ray awaits it
        """As `Replica.open`."""
        from ray import serve

        # Imported here: the process that only starts the application needs no MLX.
        from .replica import Replica

        stores = given["store"]
        name = serve.get_replica_context().replica_id.unique_id
        self._replica = await Replica.open(given, Path(stores), name, Path(tokens))

    async def answer(self, order: Order) -> AsyncGenerator[Any]:
        """As of `Replica`."""
        async for message in self._replica.answer(order):
            yield message

    async def record_routing_stats(self) -> dict[str, Any]:
        """What Ray gives to routers."""
        return await self._replica.standing()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray gives to `scaling`."""
        return {scaling.MEMORY: (await self._replica.standing())["used_share"]}

    async def __del__(self) -> None:
        """Ray awaits it before it ends the process, once no request is under way."""
        await self._replica.close()


class ServedDoor:
    """A door as Ray starts it."""

    def __init__(self, replicas: Any, tokens: Path) -> None:
        """replicas: Ray's handle."""
        from .door import Door

        self._app = Door(_Handle(replicas), Path(tokens))

    def __serve_build_asgi_app__(self) -> Any:
        return self._app


class _Handle:
    """The replicas behind Ray's handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(stream=True)

    async def answer(self, order: Order) -> AsyncGenerator[Any]:
        """As of `Replicas`."""
        from ray.exceptions import RayActorError

        messages = self._handle.answer.remote(order)
        try:
            async for message in messages:
                yield message
        except RayActorError as error:
            raise ReplicaLost(
                "The replica that answered has ended before its answer did. Ask again: the session goes on with its"
                " last answered turn."
            ) from error
        finally:
            messages.cancel()
