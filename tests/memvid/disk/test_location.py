"""Where the store is when no setting says."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.memvid.disk.location import default_store_path


def test_the_variable_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORPOR_STORE", str(tmp_path / "elsewhere"))
    assert default_store_path() == tmp_path / "elsewhere"


def test_without_it_the_user_s_data_folder_does_and_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORPOR_STORE", raising=False)
    path = default_store_path()
    assert path.parts[-2:] == ("torpor", "store")
    assert not path.exists()
