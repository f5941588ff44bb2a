"""A dialogue whose daemon is gone says how it goes on; another error stands beside the next prompt."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from torpor.cli.commands import chat
from torpor.daemon.errors import TranscriptDiverged
from torpor.errors import TorporError
from torpor.socket_api.errors import ConnectionLost

GONE, REFUSED = ConnectionLost("It ended."), TranscriptDiverged("It has gone on.")


@pytest.mark.parametrize("error", [GONE, REFUSED], ids=["gone", "refused"])
def test_a_dialogue_that_loses_its_daemon_says_how_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, error: TorporError
) -> None:
    monkeypatch.setattr(chat, "ask", Mock(side_effect=["hello", EOFError]))
    output, turn = Mock(), Mock(session="notes", answer=Mock(side_effect=error))
    if error is GONE:
        with pytest.raises(ConnectionLost):
            chat._dialogue(output, turn)
    else:
        assert chat._dialogue(output, turn) == 0
    remarks = [call.args[0] for call in output.remark.call_args_list]
    assert any("`torpor chat notes` goes on" in each for each in remarks) is (error is GONE)
