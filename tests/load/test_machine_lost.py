"""What was told survives the loss of a machine and its store, as far as `--remote-turns` says."""

from __future__ import annotations

import pytest
from torpor.tests.load.machine_lost import Plan, run


@pytest.mark.heavy
@pytest.mark.parametrize("remote_turns", ["0", "5", "off"])
def test_a_machine_that_is_lost_takes_no_turn_with_it_that_was_to_be_sent(remote_turns: str) -> None:
    report = run(Plan(remote_turns))
    assert report.wrong == []
    assert 0 < report.back <= report.told
    assert remote_turns != "0" or report.back == report.told
