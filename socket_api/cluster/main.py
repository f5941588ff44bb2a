"""The cluster put together, for `torpor serve-ray`. Owns the printed lines."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import TorporError
from ..errors import DaemonNotStarted, ExtraMissing
from ..tokens import Tokens, default_tokens_path
from .deployment import application
from .own_cluster import own_cluster

_NAME = "torpor"


def run(args: Mapping[str, Any], *, host: str, port: int, as_json: bool = False) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP: on the Ray cluster that RAY_ADDRESS names, or on a new one of this machine
    alone. args: as of `application`. as_json: print one JSON object a line.

    Raises:
        ExtraMissing: Ray is not installed.
        DaemonNotStarted: Ray has not started all of it; the message has the reason.
        UnsafeTokenFile.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to Ray's makers unasked
    if find_spec("ray") is None:
        raise _missing("ray")
    tokens = default_tokens_path()
    Tokens(tokens).make()
    stop = threading.Event()
    with ExitStack() as ours:
        try:
            address = os.environ.get("RAY_ADDRESS") or ours.enter_context(
                own_cluster(args["most_replicas"] or args["replicas"])
            )
            import ray
            from ray import serve

            ray.init(address, log_to_driver=False, logging_level="warning")
            ours.callback(ray.shutdown)
            for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # Ray has set its own
                signal.signal(each, lambda *_: stop.set())
            serve.start(http_options={"host": host, "port": port})
            ours.callback(_end_replicas)
            serve.run(application(args), name=_NAME)
        except TorporError:
            raise
        except ImportError as error:
            raise _missing(error.name) from error
        except Exception as error:
            raise DaemonNotStarted(
                f"Ray has not started the cluster: {error} The logs of its last session have more: they are in"
                f" {Path(tempfile.gettempdir()) / 'ray'}/session_latest/logs, unless Ray was told otherwise."
            ) from error
        url = f"http://{host}:{port}"
        _print(
            f"torpor serves a cluster on {url}/v1, with a token of {tokens}; stop it with Ctrl-C",
            {"event": "ready", "http": url, "pid": os.getpid(), "tokens": str(tokens)},
            as_json=as_json,
        )
        stop.wait()
    _print("torpor stopped", {"event": "stopped"}, as_json=as_json)


def _missing(package: str | None) -> ExtraMissing:
    return ExtraMissing(
        f"torpor serve-ray needs the package {package}, which is not installed: pip install 'torpor[ray]'.", extra="ray"
    )


def _end_replicas() -> None:
    """Wait until they have put their sessions to sleep; Ray ends those that take too long."""
    from ray import serve

    while True:
        with suppress(TimeoutError):
            serve.delete(_NAME)
            return


def _print(sentence: str, document: Mapping[str, object], *, as_json: bool) -> None:
    print(json.dumps(document) if as_json else sentence, flush=True)
