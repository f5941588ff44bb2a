"""The wire half and the clients run where MLX cannot be imported: of the daemon they take the records of its verbs, of
the store those of its answers, with the syntax of a session's name. The server takes more of both, and no MLX either.
The blocking client does without asyncio: commands start sooner."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import {module}
loaded = [n for n in sys.modules if n.split('.')[0] in ('asyncio', 'mlx', 'mlx_lm', 'numpy', 'transformers')]
loaded += [n for n in sys.modules if n.startswith(('torpor.daemon.', 'torpor.snapshot', 'torpor.memvid.'))]
print(' '.join(loaded))
"""
_NAMES = ("torpor.memvid.uri", "torpor.memvid.errors", "torpor.memvid.limits")
_RECORDS = ("torpor.daemon.errors", "torpor.daemon.api", "torpor.memvid.answers", *_NAMES)
_AWAITED = (*_RECORDS, "asyncio")
_SERVING = (*_AWAITED, "torpor.daemon.events", "torpor.daemon.tasks", "torpor.memvid")


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("torpor.socket_api", _RECORDS),
        ("torpor.socket_api.client.client", _RECORDS),
        ("torpor.socket_api.client.aclient", _AWAITED),
        ("torpor.socket_api.wire.connection", _RECORDS),
        ("torpor.socket_api.server.serving", _SERVING),
    ],
)
def test_importing_it_brings_no_mlx_and_of_the_daemon_what_is_named_alone(
    module: str, allowed: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(module=module)], capture_output=True, text=True, check=True, timeout=60
    )
    assert [name for name in done.stdout.split() if not name.startswith(allowed)] == []
