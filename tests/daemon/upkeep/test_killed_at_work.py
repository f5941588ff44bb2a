"""SIGKILL of a daemon whose agent works without a pause: less than two blocks, and no turn is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torpor.tests.daemon.session_rig import MODEL, open_rigged
from torpor.tests.daemon.upkeep import working_daemon
from torpor.tests.daemon.upkeep.working_daemon import DEMO, LONG_TURNS


@pytest.mark.one_in(1)  # two daemons on the demo model; test_writing_behind.py has copies of the store in each run
@pytest.mark.timeout(300)
async def test_a_sigkill_in_the_midst_of_work_costs_less_than_two_blocks_of_what_was_acknowledged(
    store: Path, digest_cache: Path
) -> None:
    command = [sys.executable, str(Path(working_daemon.__file__)), str(digest_cache), str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        told = [daemon.stdout.readline().split() for _ in LONG_TURNS]
        daemon.kill()
    held, written = map(int, told[-1])
    async with open_rigged(store, {MODEL: str(DEMO)}, digest_cache) as rig:
        woken = await rig.wake("agent")
        assert woken.token_count == held
        assert woken.provenance.recomputed.same_logits
        assert woken.provenance.recomputed.tokens <= held - written < 512
        answer = await rig.service.chat("agent", message="And now?", max_tokens=1)
        assert answer.recomputed_tokens == 0, "the wake has told of them"
