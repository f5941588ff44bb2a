"""`torpor serve-ray`: several daemons as one, under Ray."""

from __future__ import annotations

from typing import Annotated, Any, Final

from ...daemon.options.serve_options import GIVEN_OPTIONS
from ...memvid.disk.location import default_store_path
from ..errors import InvalidUsage
from ..exit_codes import OK
from ..reach.options import JsonOption, option, takes
from .serve_parameters import given_of, options_of

_NOT_TAKEN: Final = ("config", "socket", "http", "http_socket", "no_inspector")
"""Options of `torpor serve` for the sockets of one daemon."""

ReplicasOption = Annotated[
    int, option("--replicas N", "How many daemons there are. Default: 2.", min=1, max=1024, rich_help_panel="HTTP")
]
HostOption = Annotated[
    str, option("--host ADDRESS", "Where requests are taken. Default: 127.0.0.1.", rich_help_panel="HTTP")
]
PortOption = Annotated[
    int, option("--port PORT", "On which port. Default: 8000.", min=1, max=65535, rich_help_panel="HTTP")
]


@takes(options_of(*(name for name in GIVEN_OPTIONS if name not in _NOT_TAKEN)))
def serve_ray(
    replicas: ReplicasOption = 2,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    as_json: JsonOption = False,
    **values: Any,
) -> int:
    """Each of them has the models, and a store of its own below --store. All have one --remote: a session that one has
    goes on in another, also after a crash, with its last answered turn. A request goes where its session is awake, else
    where it would be ready soonest. It needs an extra: pip install 'torpor\\[ray]'. It runs on the cluster that
    RAY_ADDRESS names, or on one that it begins on this machine. --remote-lease is 5 seconds here, --remote-turns 0,
    and --store a folder for all stores.

    [bold]Examples[/]

    [cyan]torpor serve-ray --remote file:///mnt/share/torpor --replicas 2[/]
    [cyan]RAY_ADDRESS=auto torpor serve-ray --remote s3://BUCKET/x --replicas 8[/]
    """
    given = given_of(values)
    if "remote" not in given:
        raise InvalidUsage(
            "torpor serve-ray needs --remote URL: through it the daemons share sessions.", option="--remote"
        )
    store = (given.get("store") or default_store_path().with_name("stores")).absolute()
    # Imported here, as `torpor serve` imports the daemon.
    from ...socket_api.cluster.main import run

    run({**given, "store": store, "replicas": replicas}, host=host, port=port, as_json=as_json)
    return OK.number
