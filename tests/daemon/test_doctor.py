"""The facts about this machine, as the process that the command line starts prints them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from torpor.daemon import doctor
from torpor.snapshot import blas


def examined(
    monkeypatch: pytest.MonkeyPatch, device: str, rates: list[float], managers: list[str], library: str | None = None
) -> dict[str, Any]:
    monkeypatch.setattr(doctor, "_measure", lambda: (device, rates))
    monkeypatch.setattr(doctor.blas, "library_in_use", lambda: library)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}" if name in managers else None)
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    facts: dict[str, Any] = doctor.examine()["blas"]
    return facts


@pytest.mark.one_in(3)
def test_the_process_prints_one_json_object_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torpor.daemon.doctor"], capture_output=True, text=True, timeout=60, check=True
    )
    facts = json.loads(done.stdout)
    assert done.stderr == ""
    assert facts["blas"]["gflops_lowest"] <= facts["blas"]["gflops"] <= facts["blas"]["gflops_highest"]
    assert facts["blas"]["product"] == "512x512x512 float32"
    assert facts["packages"]["mlx"] is not None
    assert facts["torpor"] == doctor.__version__


def test_a_slow_library_is_told_with_the_command_that_gets_the_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = examined(monkeypatch, "Device(cpu, 0)", [1.9, 2.0, 2.1], ["dnf"])
    assert (facts["fast"], facts["gflops"]) == (False, 2.0)
    assert blas.HOW_TO_GET_IT["dnf"] in facts["advice"]


def test_a_fast_library_that_is_slow_just_now_is_not_to_be_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = examined(monkeypatch, "Device(cpu, 0)", [9.0], ["apt-get"], "/usr/lib/libopenblas.so.0")
    assert (facts["fast"], facts["library"]) == (False, "/usr/lib/libopenblas.so.0")
    assert "is slow just now. Is the machine busy?" in facts["advice"]
    assert "apt-get" not in facts["advice"]


def test_without_a_known_package_manager_the_advice_is_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "package manager" in examined(monkeypatch, "Device(cpu, 0)", [2.0], [])["advice"]


def test_a_fast_library_needs_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = examined(monkeypatch, "Device(cpu, 0)", [90.0, 120.0, 100.0], ["apt-get"])
    assert (facts["fast"], facts["gflops"], facts["advice"]) == (True, 100.0, None)


def test_a_gpu_is_not_judged_by_its_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = examined(monkeypatch, "Device(gpu, 0)", [5.0], ["apt-get"])
    assert (facts["library"], facts["advice"]) == (None, None)


def test_a_cuda_wheel_that_lies_under_another_is_told_though_the_blas_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.blas, "replaced_cuda_wheel", lambda: "mlx-cuda-13")
    advice = examined(monkeypatch, "Device(cpu, 0)", [90.0], [])["advice"]
    assert f"--no-deps mlx-cuda-13=={doctor._version('mlx')}." in advice


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert doctor._version("no-such-package-as-this") is None
