"""A text is told by the tokenizer whose files have the digest that the version has, and by no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from torpor.daemon.models.models import DEMO_MODEL_FOLDER, load_model
from torpor.daemon.views import words
from torpor.daemon.views.words import TOKENIZER, why_no_words, words_for
from torpor.snapshot.digests import DigestCache

TEXT = "def a():\n    return 'Grüße 🎲'"


@pytest.fixture(autouse=True)
def _of_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(words, "user_folder", lambda kind: tmp_path / kind / "torpor")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def test_it_tells_what_the_model_itself_tells(tmp_path: Path) -> None:
    model = load_model("demo", str(DEMO_MODEL_FOLDER), DigestCache(tmp_path / "digests.json"))
    found = words_for(dict(model.identity.parts)[TOKENIZER], "demo")
    assert found is not None
    ids = model.tokenizer.encode(f"<|im_start|>user\n{TEXT}<|im_end|>")
    assert found.decode(ids) == model.tokenizer.decode(ids) == f"<|im_start|>user\n{TEXT}<|im_end|>"
    assert set(found.controls.values()) == model.control_texts
    assert found.decode([*ids[:2], 99_999]) == found.decode(ids[:2]) + "\N{REPLACEMENT CHARACTER}"


def test_a_tokenizer_of_other_files_is_not_taken_and_one_of_the_cache_or_of_an_earlier_daemon_is(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "hub" / "models--org--other" / "snapshots" / "1"
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL_FOLDER / name, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"]["5000"] = {"content": "<|more|>", "special": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    part = words._digest(folder, tuple(words._stamp(file) for file in words.tokenizer_files_in(folder)))
    found = words_for(part, "org/other")
    assert found is not None
    assert found.decode([2725, 5000]) == "Hel<|more|>"  # in its settings alone
    moved = folder.rename(tmp_path / "elsewhere")
    assert words_for(part, "org/other") is None
    (tmp_path / "cache" / "torpor").mkdir(parents=True)
    digests = {"format": "torpor.digests/1", "files": {str(moved / "tokenizer.json"): []}}
    (tmp_path / "cache" / "torpor" / "digests.json").write_text(json.dumps(digests))
    assert words_for(part, "org/other") is not None
    (moved / "tokenizer.json").write_text("{}")
    assert words_for(part, "org/other") is None
    assert "'org/other' is not at hand" in why_no_words("org/other")
