"""The cluster put together, for `torpor serve-ray`. Owns the printed lines."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..errors import DaemonNotStarted, ExtraMissing
from ..tokens import Tokens, default_tokens_path
from .deployment import application

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
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ExtraMissing(
            f"torpor serve-ray needs the package {error.name}, which is not installed: pip install 'torpor[ray]'.",
            extra="ray",
        ) from error
    tokens = default_tokens_path()
    Tokens(tokens).make()
    stop = threading.Event()
    try:
        try:
            ray.init(log_to_driver=False, logging_level="warning")
            for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # Ray has set its own
                signal.signal(each, lambda *_: stop.set())
            serve.start(http_options={"host": host, "port": port})
            serve.run(application(args), name=_NAME)
        except Exception as error:
            raise DaemonNotStarted(
                f"Ray has not started the cluster: {error} The logs of its last session have more: they are in"
                " session_latest/logs of its folder, by default /tmp/ray."
            ) from error
        url = f"http://{host}:{port}"
        _print(
            f"torpor serves a cluster on {url}/v1, with a token of {tokens}; stop it with Ctrl-C",
            {"event": "ready", "http": url, "pid": os.getpid(), "tokens": str(tokens)},
            as_json=as_json,
        )
        stop.wait()
    finally:
        if ray.is_initialized():
            while True:  # until the replicas have put their sessions to sleep; Ray ends those that take too long
                with suppress(TimeoutError):
                    serve.delete(_NAME)
                    break
        ray.shutdown()
    _print("torpor stopped", {"event": "stopped"}, as_json=as_json)


def _print(sentence: str, document: Mapping[str, object], *, as_json: bool) -> None:
    print(json.dumps(document) if as_json else sentence, flush=True)
