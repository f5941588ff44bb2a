"""An edited model file is found even when its size and times are kept: on the next full check (threats 53 to 56)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.models.adapters import AdapterChoice
from torpor.snapshot import digests
from torpor.snapshot.errors import IdentityMismatch
from torpor.tests.daemon.adapter_making import write_adapter
from torpor.tests.daemon.session_rig import tokens_of

JINJA = "{{ messages[0]['content'] }}"


@pytest.fixture(autouse=True)
def _settled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a test are new; these tests are about such as have been remembered."""
    monkeypatch.setattr(digests, "_CLOCK_GRAIN_NS", -1)


@pytest.fixture
def adapter(own_tiny_model: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", own_tiny_model)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "old", "new", "part"),
    [
        ("model.safetensors", None, b"", "weights"),
        ("tokenizer.json", b'"<|endoftext|>"', b'"<|endOftext|>"', "tokenizer"),
        ("adapters.safetensors", None, b"", "adapter"),
    ],
)
async def test_a_remembered_file_edited_unseen_is_found_by_a_full_check_which_names_it(
    open_rig: Any, own_tiny_model: Path, adapter: Path, digest_cache: Path, edit_unseen: Any,
    name: str, old: bytes | None, new: bytes, part: str,
) -> None:  # fmt: skip
    served = {"model": own_tiny_model, "adapters": {"tiny": AdapterChoice(str(adapter))}}
    file = next(folder / name for folder in (own_tiny_model, adapter) if (folder / name).exists())
    async with open_rig(**served) as rig:
        await rig.asleep("a", tokens_of(1, 10))
        slept_with = rig.model.identity
    edit_unseen(file, digest_cache, old, new)
    async with open_rig(**served) as rig:
        assert rig.model.identity == slept_with, "else this test tests nothing"
        assert rig.service.warnings == ()
    async with open_rig(**served, check_models=True) as rig:
        (warning,) = rig.service.warnings
        with pytest.raises(IdentityMismatch) as refusal:
            await rig.wake("a")
    assert str(file) in warning
    assert [each["field"] for each in refusal.value.mismatched_fields] == [part]
    async with open_rig(**served) as rig:
        assert rig.service.warnings == ()
        with pytest.raises(IdentityMismatch):
            await rig.wake("a")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "old", "new", "part"),
    [
        ("tokenizer_config.json", b"assistant", b"assIstant", "template"),
        ("chat_template.jinja", b"content", b"cOntent", "template"),
        ("config.json", b"10000.0", b"20000.0", "rope"),
        ("tokenizer_config.json", b'"clean_up_tokenization_spaces": false', b'"clean_up_tokenization_spaces":  true',
         "tokenizer"),
        ("adapter_config.json", b"10.0", b"11.0", "adapter"),
    ],
)  # fmt: skip
async def test_settings_and_templates_are_read_at_each_load_and_need_no_check(
    open_rig: Any, own_tiny_model: Path, adapter: Path, digest_cache: Path, edit_unseen: Any,
    name: str, old: bytes, new: bytes, part: str,
) -> None:  # fmt: skip
    if name == "chat_template.jinja":
        (own_tiny_model / name).write_text(JINJA)
    served = {"model": own_tiny_model, "adapters": {"tiny": AdapterChoice(str(adapter))}}
    async with open_rig(**served) as rig:
        await rig.asleep("a", tokens_of(1, 10))
    edit_unseen(
        next(each / name for each in (own_tiny_model, adapter) if (each / name).exists()), digest_cache, old, new
    )
    async with open_rig(**served) as rig:
        with pytest.raises(IdentityMismatch) as refusal:
            await rig.wake("a")
    assert part in [each["field"] for each in refusal.value.mismatched_fields]


async def test_a_full_check_of_sound_files_says_nothing(open_rig: Any) -> None:
    for _ in range(2):
        async with open_rig(check_models=True) as rig:
            assert rig.service.warnings == ()
