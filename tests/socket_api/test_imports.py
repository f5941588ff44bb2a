"""The wire half and the clients run where MLX cannot be imported: of the daemon they take the records of its verbs."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import {module}
loaded = [n for n in sys.modules if n.split('.')[0] in ('mlx', 'mlx_lm', 'numpy', 'transformers')]
loaded += [n for n in sys.modules if n.startswith(('torpor.daemon.', 'torpor.snapshot', 'torpor.memvid'))]
print([n for n in loaded if n != 'torpor.daemon.errors' and not n.startswith('torpor.daemon.api')])
"""


@pytest.mark.parametrize(
    "module",
    [
        "torpor.socket_api",
        "torpor.socket_api.client",
        "torpor.socket_api.client.aclient",
        "torpor.socket_api.wire.connection",
    ],
)
def test_importing_a_client_brings_no_mlx_and_of_the_daemon_its_records_alone(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(module=module)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
