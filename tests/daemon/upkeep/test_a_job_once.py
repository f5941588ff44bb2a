"""A job of upkeep costs a class and a row: then it runs beside the others, yields to orders, fails without harm to
anybody, and ends with the daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torpor.tests.changed_copy import copy_package, environment_of, put, put_import, require_sound

CLASS = '''"""Counts, for nobody."""

from __future__ import annotations

from typing import ClassVar

from .loop import NOW, Job


class Counting(Job[None]):
    """Counts to three, and at the third time until it has to stop."""

    name: ClassVar = "count"
    count = 0

    def due(self) -> list[tuple[None, float]]:
        return [(None, NOW)] if self.count < 3 else []

    async def piece(self, _: None) -> None:
        self.count += 1
        if self.count == 2:
            raise ValueError("two is not counted")
        async with self._thread.piece():
            await self._thread.run(self._count_on)

    def _count_on(self) -> None:
        while self.count == 3 and not self._thread.must_stop():
            pass
'''
IMPORT = "from ..upkeep.counting import Counting"
ROW = "        self.counting = Counting(loop)\n"
PROGRAM = """
import asyncio, sys
from pathlib import Path
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
from torpor.daemon.upkeep import loop


def state_of(service):
    (state,) = [each for each in service._parts.upkeep.loop.states() if each.name == "count"]
    return state


async def begun(service):
    while not (service._parts.upkeep.counting.count == 3 and state_of(service).running):
        await asyncio.sleep(0.01)


async def main():
    loop.AGAIN_S = 0.05
    service = await Service.open(ServeOptions(store=Path(sys.argv[1])), models={"demo": sys.argv[2]})
    async with asyncio.timeout(30):
        await begun(service)
        await service.maintain(operation="repack")  # it yields to that
        while state_of(service).running:
            await asyncio.sleep(0.01)
        assert state_of(service).failures == 0 and state_of(service).last is not None, state_of(service)
        service._parts.upkeep.counting.count = 0
        service._parts.upkeep.counting.look_again()
        await begun(service)
        await service.close()
        assert state_of(service).running is None
    print("a job once")


asyncio.run(main())
"""


def put_job(package: Path) -> None:
    (package / "daemon" / "upkeep" / "counting.py").write_text(CLASS)
    parts = package / "daemon" / "parts" / "upkeep.py"
    put_import(parts, IMPORT)
    put(parts, ROW, behind="        self.loop = loop = store.upkeep_loop\n")


def test_what_a_job_costs_has_its_place_in_the_code(tmp_path: Path) -> None:
    """Each commit checks this, though few try the job."""
    put_job(package := copy_package(tmp_path))
    require_sound(package)


@pytest.mark.one_in(2)
def test_a_job_is_added_by_its_class_and_its_row(tmp_path: Path, tiny_model: Path) -> None:
    put_job(copy_package(tmp_path))

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(tiny_model)],
        env=environment_of(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "a job once\n", done.stderr
    assert "count failed, and is tried again in 0.05 s: ValueError('two is not counted')" in done.stderr
