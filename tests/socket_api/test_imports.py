"""The wire half and the clients run where neither MLX nor the daemon can be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import {module}
loaded = [n for n in sys.modules if n.split('.')[0] in ('mlx', 'mlx_lm', 'numpy', 'transformers')]
loaded += [n for n in sys.modules if n.startswith(('torpor.daemon', 'torpor.snapshot', 'torpor.memvid'))]
print(loaded)
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
def test_importing_a_client_brings_neither_mlx_nor_the_daemon(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(module=module)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
