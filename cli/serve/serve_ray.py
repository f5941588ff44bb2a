"""`torpor serve-ray`: several daemons as one, under Ray."""

from __future__ import annotations

from typing import Any, Final

from ...daemon.options.configuration import Configuration, read_configuration
from ...daemon.options.serve_options import CLUSTER_OPTIONS, GIVEN_OPTIONS
from ...memvid.disk.location import default_store_path
from ..errors import InvalidUsage
from ..exit_codes import OK
from ..reach.options import JsonOption, takes
from .serve_parameters import annotation_of, given_of, options_of

_NOT_TAKEN: Final = ("socket", "http", "http_socket", "no_inspector")
"""Options of `torpor serve` for the sockets of one daemon."""

_OF_CLUSTER: Final = {name: annotation_of(each) for name, each in CLUSTER_OPTIONS.items()}


@takes(options_of(*(name for name in GIVEN_OPTIONS if name not in _NOT_TAKEN)) | _OF_CLUSTER)
def serve_ray(as_json: JsonOption = False, **values: Any) -> int:
    """Each of them has the models, and a store of its own below --store. All have one --remote: a session that one has
    goes on in another, also after a crash, with its last answered turn. A request goes where its session is awake, else
    where it would be ready soonest. It needs an extra: pip install 'torpor\\[ray]'. It runs on the cluster that
    RAY_ADDRESS names, or on one that it begins on this machine. --remote-lease is 5 seconds here, --remote-turns 0,
    and --store a folder for all stores. A file of --config may have a table [[cluster]], and serves one daemon, too.

    [bold]Examples[/]

    [cyan]torpor serve-ray --remote file:///mnt/share/torpor --replicas 2[/]
    [cyan]RAY_ADDRESS=auto torpor serve-ray --remote s3://BUCKET/x --replicas 8[/]
    """
    told = {name: value for name in CLUSTER_OPTIONS if (value := values.pop(name)) is not None}
    given = given_of(values)
    file = Configuration() if "config" not in given else read_configuration(given["config"])
    if "remote" not in given and "remote" not in file.options:
        raise InvalidUsage(
            "torpor serve-ray needs --remote URL: through it the daemons share sessions.", option="--remote"
        )
    store = (given.get("store") or default_store_path().with_name("stores")).absolute()
    # Imported here, as `torpor serve` imports the daemon.
    from ...socket_api.cluster.main import run

    defaults = {name: each.default for name, each in CLUSTER_OPTIONS.items()}
    cluster = {**defaults, **file.cluster, **told}
    host, port = cluster.pop("host"), cluster.pop("port")
    most = cluster["most_replicas"]
    if most is not None and most < cluster["replicas"]:
        raise InvalidUsage(
            f"There are to be {cluster['replicas']} replicas and at most {most}: give more.", option="--most-replicas"
        )
    run({**given, **cluster, "store": store}, host=host, port=port, as_json=as_json)
    return OK.number
