"""Which BLAS MLX gets is decided before MLX is imported, in processes of their own: it cannot be undone in this one."""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torpor.snapshot import blas

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = sorted(
    f"torpor.{folder}.{path.stem}".removesuffix(".__init__")
    for folder in ("snapshot", "daemon")
    for path in (ROOT / folder).glob("*.py")
)
linux_cpu = pytest.mark.skipif(
    sys.platform != "linux" or blas._has_cuda_wheel(), reason="MLX brings a fast BLAS of its own here"
)
needs_openblas = pytest.mark.skipif(not ctypes.util.find_library("openblas"), reason="OpenBLAS is not installed")


def say(script: str, **environment: str) -> object:
    """The JSON that a fresh interpreter prints for the script."""
    plain = {name: value for name, value in os.environ.items() if name != blas.OVERRIDE_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=plain | environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


CHOICE = """
import json
from torpor.snapshot import blas
choice = blas.load_fast_blas()
assert choice is blas.load_fast_blas()
print(json.dumps([choice.library, choice.reason, blas.library_in_use()]))
"""


@pytest.mark.one_in(2)
@linux_cpu
@needs_openblas
def test_a_fast_library_is_found_and_then_in_use() -> None:
    library, reason, in_use = say(CHOICE)  # type: ignore[misc]
    assert library in reason
    assert "openblas" in in_use


@pytest.mark.one_in(2)
@linux_cpu
def test_the_reference_library_is_kept_on_request() -> None:
    library, reason, in_use = say(CHOICE, TORPOR_BLAS="reference")  # type: ignore[misc]
    assert (library, in_use) == (None, None)
    assert "TORPOR_BLAS" in reason


@pytest.mark.one_in(2)
@linux_cpu
@pytest.mark.parametrize("library", ["/no/such/library.so", "libm.so.6"])
def test_a_library_that_is_missing_or_no_blas_is_named_and_left_alone(library: str) -> None:
    loaded, reason, in_use = say(CHOICE, TORPOR_BLAS=library)  # type: ignore[misc]
    assert (loaded, in_use) == (None, None)
    assert library in reason
    assert "slower" in reason


@pytest.mark.one_in(2)
@linux_cpu
def test_it_is_too_late_once_mlx_is_imported() -> None:
    script = f"import mlx.core\n{CHOICE}"
    library, reason, _ = say(script)  # type: ignore[misc]
    assert library is None
    assert "too late" in reason


@pytest.mark.one_in(2)
@linux_cpu
@needs_openblas
def test_products_are_the_same_numbers_and_still_computed_with_the_fast_library() -> None:
    script = """
import json
import torpor.snapshot
import mlx.core as mx
left = mx.arange(64, dtype=mx.float32).reshape(8, 8)
print(json.dumps((left @ left)[0].tolist()))
"""
    assert say(script) == say(script, TORPOR_BLAS="reference")


# Stands in for mlx.core, and notes whether the BLAS had been chosen when it was first asked for.
FINDER = """
import importlib, importlib.abc, json, sys
seen = {}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "mlx.core":
            blas = sys.modules.get("torpor.snapshot.blas")
            seen.setdefault("chosen", blas is not None and getattr(blas, "_choice", None) is not None)
            raise ImportError("that is all we wanted to know")

sys.meta_path.insert(0, Finder())
answers = {}
for module in MODULES:
    seen.clear()
    for name in [name for name in sys.modules if name.startswith(("torpor", "mlx"))]:
        del sys.modules[name]
    try:
        importlib.import_module(module)
    except ImportError:
        pass
    answers[module] = seen.get("chosen")
print(json.dumps(answers))
"""


@linux_cpu
def test_whatever_module_is_imported_first_the_blas_is_chosen_before_mlx() -> None:
    answers = say(FINDER.replace("MODULES", repr(MODULES)), TORPOR_BLAS="reference")
    assert isinstance(answers, dict)
    assert set(answers) == set(MODULES)
    too_early = [module for module, chosen in answers.items() if chosen is False]
    assert too_early == []
    assert answers["torpor.daemon.service"] is True
    assert answers["torpor.snapshot.kinds"] is True


def test_nothing_is_done_where_it_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas._choose().library is None
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "_has_cuda_wheel", lambda: True)
    assert "CUDA" in blas._choose().reason


@pytest.fixture
def install_cuda_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Installs a CUDA wheel, aside, with these bytes where its library was."""

    def install(library: bytes) -> None:
        facts, lib = tmp_path / "mlx_cuda_13-0.32.4.dist-info", tmp_path / "mlx" / "lib"
        for folder in (facts, lib):
            folder.mkdir(parents=True)
        (lib / "libmlx.so").write_bytes(library)
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-cuda-13\nVersion: 0.32.4\n")
        (facts / "RECORD").write_text(f"mlx/lib/libmlx.so,sha256=x,{len(OF_CUDA_WHEEL)}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


OF_CUDA_WHEEL = b"the library that computes on a GPU"


@linux_cpu
def test_a_cuda_wheel_in_place_needs_no_blas(install_cuda_wheel: Callable[[bytes], None]) -> None:
    install_cuda_wheel(OF_CUDA_WHEEL)
    assert "CUDA" in blas._choose().reason
    assert blas.replaced_cuda_wheel() is None


@linux_cpu
def test_a_cuda_wheel_whose_library_the_cpu_wheel_has_replaced_is_told(
    install_cuda_wheel: Callable[[bytes], None],
) -> None:
    """pip puts both libraries at one path, and Torpor depends on the CPU wheel."""
    assert blas.replaced_cuda_wheel() is None
    install_cuda_wheel(b"another")
    assert "CUDA" not in blas._choose().reason
    assert blas.replaced_cuda_wheel() == "mlx-cuda-13"
