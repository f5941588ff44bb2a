"""The command line stays light: importing it brings in neither the model's world nor the daemon."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import sys
import torpor.cli.main
import torpor.cli.registry
torpor.cli.registry.build_app()
heavy = ("mlx", "mlx_lm", "transformers", "numpy", "torpor.daemon", "torpor.snapshot")
print([n for n in sys.modules if n in heavy or n.startswith(tuple(f"{h}." for h in heavy))])
"""


def test_importing_the_command_line_loads_no_model_library_and_no_daemon() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
