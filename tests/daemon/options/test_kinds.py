"""The kinds of options: which texts and values they take."""

from __future__ import annotations

import pytest
from torpor.daemon.options.kinds import Duration


@pytest.mark.parametrize("written", ["0", " 0 ", 0, 0.0, Duration(word="off").argument(0.0)])
def test_a_duration_with_a_word_is_zero_too_wherever_it_is_written(written: object) -> None:
    """On a command line it is text, in the configuration a number."""
    assert Duration(word="off").read(written) == 0.0
    with pytest.raises(ValueError, match="duration"):
        Duration().read(written)
