"""What a wake or a sleep must refuse, with a typed error that names it, and with store and live sessions as they were.

Every refusal of a wake is followed by the question of T12 and #27068: does a session beside it go on bit for bit?
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.errors import ModelUnavailable, UnknownModel
from torpor.daemon.models import canary
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
from torpor.errors import TorporError
from torpor.memvid.answers import VersionInfo
from torpor.memvid.errors import CorruptBlock, DurabilityLost, NoSpace, SessionNotFound, StoreLocked
from torpor.memvid.format.blocks import BlockDraft, SlotDraft, SlotSpec
from torpor.memvid.format.identity import Identity
from torpor.memvid.index.index import Index
from torpor.memvid.store import Store, VersionDraft
from torpor.memvid.uri import SessionUri
from torpor.snapshot.errors import IdentityMismatch
from torpor.tests.daemon.session_rig import MODEL, SAMPLED, Rigged, flip, manifests, packs, tokens_of

URI_A = SessionUri("default", "a")


def contents(store: Path) -> dict[Path, bytes]:
    """Every manifest and pack of the store, and what there is beside them."""
    return {path: path.read_bytes() for folder in ("versions", "packs") for path in (store / folder).iterdir()}


@contextlib.asynccontextmanager
async def unharmed(rig: Rigged, store: Path) -> AsyncIterator[None]:
    """Neither the store's files nor a session that is awake change while the body runs."""
    for name in ("bystander", "twin"):
        await rig.read(name, tokens_of(77, 300), sampling=SAMPLED)
        await rig.write(name, 5)
    before, files = await rig.fingerprint("bystander"), contents(store)
    yield
    assert contents(store) == files
    assert await rig.fingerprint("bystander") == before
    assert await rig.write("bystander", 8) == await rig.write("twin", 8)
    for name in ("bystander", "twin"):
        await rig.service.delete(name)


async def refusal_of(rig: Rigged, name: str = "a") -> TorporError:
    """The error of a wake that is refused; the session stays asleep."""
    with pytest.raises(TorporError) as refusal:
        await rig.wake(name)
    assert not rig.is_awake(name)
    with pytest.raises(TorporError) as again:
        await rig.service.generate(name, max_tokens=1)
    assert again.value.code == refusal.value.code
    return refusal.value


async def refused(rig: Rigged, store: Path, name: str = "a") -> TorporError:
    """The error of a wake that is refused; the session stays asleep and everything else as it was."""
    async with unharmed(rig, store):
        return await refusal_of(rig, name)


async def sleeping(rig: Rigged, name: str = "a", *, count: int = 600, seed: int = 1) -> None:
    await rig.asleep(name, tokens_of(seed, count))


# --- a bundle that is not the one that was promised


@pytest.mark.one_in(2)
async def test_a_bundle_repointed_to_another_sessions_is_refused_gm2_gm3_threat_7(
    rig: Rigged, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sessions of one model and one length: only the owner tells them apart, and the index is bent to lie."""
    await sleeping(rig, "a", seed=1)
    await sleeping(rig, "b", seed=2)
    find, others = Index.find, {"a": "b", "b": "a"}

    def bent(self: Index, uri: SessionUri, version: int | None = None) -> VersionInfo | None:
        row = find(self, SessionUri(uri.namespace, others.get(uri.name, uri.name)), version)
        return replace(row, session=str(uri)) if row else None

    monkeypatch.setattr(Index, "find", bent)
    assert (await refused(rig, store)).code == "owner_mismatch"
    assert (await refused(rig, store, "b")).code == "owner_mismatch"
    for order in ({}, {"at_token": 100}):
        with pytest.raises(TorporError) as unplanned:
            await rig.service.plan_wake("a", **order)
        assert unplanned.value.code == "owner_mismatch"


@pytest.mark.one_in(1)
@pytest.mark.parametrize("folder", ["versions", "packs"])
async def test_a_file_replaced_by_another_sessions_is_refused_gm2(rig: Rigged, store: Path, folder: str) -> None:
    await sleeping(rig, "a", seed=1)
    (mine,) = (store / folder).iterdir()
    await sleeping(rig, "b", seed=2)
    (other,) = set((store / folder).iterdir()) - {mine}
    shutil.copyfile(other, mine)
    error = await refused(rig, store)
    assert error.code == "bundle_mismatch"
    assert str(mine) in error.message
    await rig.wake("b")


# --- damage


def regions(path: Path) -> dict[str, int]:
    """An offset within each part of a manifest or pack (docs/reference/format.md)."""
    if path.suffix == ".mvm":
        return {"header": 20, "manifest": 64 + 40}
    trailer = path.stat().st_size - 104
    directory = int.from_bytes(path.read_bytes()[trailer + 8 : trailer + 16], "little")
    return {
        "header": 20,
        "block head": 64 + 70,
        "first slot": 64 + 4096,
        "last slot": directory - 62,
        "directory": directory + 40,
        "trailer": trailer + 30,
    }


@pytest.mark.parametrize("folder", ["versions", "packs"])
async def test_one_flipped_bit_is_refused_t12(rig: Rigged, store: Path, folder: str) -> None:
    await sleeping(rig)
    (path,) = (store / folder).iterdir()
    sound = path.read_bytes()
    async with unharmed(rig, store):
        for offset in regions(path).values():
            flip(path, offset)
            error = await refusal_of(rig)
            assert error.code in {"corrupt_bundle", "corrupt_block", "bundle_mismatch"}
            assert str(path) in error.message
            path.write_bytes(sound)
    await rig.wake("a")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", ["plain", "gemma3_text", "lfm2", "recurrent_gemma", "mamba2"])
async def test_a_flipped_bit_in_any_slot_of_any_kind_of_cache_is_refused_t12(
    open_kind: Any, store: Path, kind: str
) -> None:
    """Keys and values, windows and recurrences, the last state and the checkpoints before it: every slot of every
    block."""
    async with open_kind(kind) as rig:
        await sleeping(rig)
        (path,) = packs(store)
        places: list[tuple[str, int, str, int]] = []
        with rig.service._parts.store.disk.open_session(URI_A) as reader:
            for entry in reader.entries:
                with reader.holding(entry) as file:
                    header, head = file.checked_heads[entry.id]
                    begin = file.frame_of(entry.id).offset
                    for (spec, _), stored, at in zip(header.slots, head.stored, head.payload_offsets, strict=True):
                        if stored.stored_bytes:
                            places.append((entry.kind, entry.start, spec.name, begin + at + stored.stored_bytes // 2))
        ends = {start for block, start, *_ in places if block == "state"}
        assert ends >= ({600} if kind == "plain" else {512, 600}), "the last state, and a checkpoint"
        for block, start, name, offset in places:
            flip(path, offset)
            at = 512 if (block, start) == ("state", 512) else None  # a checkpoint is read only by who goes back to it
            with pytest.raises(CorruptBlock) as refusal:
                await rig.wake("a", at_token=at)
            assert refusal.value.details["slot"] == name
            assert not rig.is_awake("a")
            flip(path, offset)
        assert (await rig.wake("a")).canary == "same_bits"


async def test_a_bad_block_of_an_ancestor_is_refused_and_named(rig: Rigged, store: Path) -> None:
    """A delta bundle is only as good as the blocks that it refers to."""
    await sleeping(rig)
    (ancestor,) = packs(store)
    await rig.write("a", 3)
    await rig.sleep("a")
    flip(ancestor, regions(ancestor)["first slot"])
    error = await refused(rig, store)
    assert error.code == "corrupt_block"
    assert str(ancestor) in error.message


@pytest.mark.parametrize(
    ("folder", "cuts", "missing"),
    [("versions", (0, 10, 70, -1), "bundle_missing"), ("packs", (0, 10, 70, 5000, -1, -104, -105), "block_missing")],
)
async def test_a_truncated_file_is_refused_threat_1(
    rig: Rigged, store: Path, folder: str, cuts: tuple[int, ...], missing: str
) -> None:
    await sleeping(rig)
    (path,) = (store / folder).iterdir()
    sound = path.read_bytes()
    async with unharmed(rig, store):
        for kept in cuts:
            path.write_bytes(sound[:kept])
            assert (await refusal_of(rig)).code == "truncated"
        path.unlink()
        assert (await refusal_of(rig)).code == missing
        path.write_bytes(sound)


async def test_bytes_that_rot_between_the_check_of_heads_and_the_reading_are_refused(
    rig: Rigged, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T12: the failure comes when memory is half filled, and nothing of it is ever seen."""
    from torpor.snapshot import restore

    await sleeping(rig)
    (path,) = packs(store)
    allocate = restore.allocate

    def rot_then_allocate(plan: Any) -> Any:
        data = path.read_bytes()
        if data[64 + 4096] == sound:
            flip(path, 64 + 4096)
        return allocate(plan)

    sound = path.read_bytes()[64 + 4096]
    async with unharmed_but(rig, {path}):
        monkeypatch.setattr(restore, "allocate", rot_then_allocate)
        with pytest.raises(TorporError) as refusal:
            await rig.wake("a")
        monkeypatch.undo()
    assert refusal.value.code == "corrupt_block"


@contextlib.asynccontextmanager
async def unharmed_but(rig: Rigged, _changed: set[Path]) -> AsyncIterator[None]:
    """A session that is awake does not change while the body runs."""
    await rig.read_each(("bystander", "twin"), tokens_of(77, 300))
    yield
    assert await rig.write("bystander", 8) == await rig.write("twin", 8)


# --- another model


def rewrite_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    flip(path, path.stat().st_size - 6)


def change_weights_and_hide_it(folder: Path) -> None:
    """Same size, same modification time: only the change time tells."""
    path = folder / "model.safetensors"
    status = path.stat()
    change_weights(folder)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def change_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    loaded = json.loads(path.read_text())
    vocabulary = loaded["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(loaded))


def change_tokenizer_settings(folder: Path) -> None:
    rewrite_json(folder / "tokenizer_config.json", padding_side="left")


def change_template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    rewrite_json(path, chat_template=json.loads(path.read_text())["chat_template"] + " ")


def move_template_to_its_own_file_and_change_it(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def change_config(folder: Path) -> None:
    rewrite_json(folder / "config.json", initializer_range=0.5)


def change_rope(folder: Path) -> None:
    rewrite_json(folder / "config.json", rope_theta=20000.0)


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("change", "field"),
    [
        (change_weights, "weights"),
        (change_weights_and_hide_it, "weights"),
        (change_tokenizer, "tokenizer"),
        (change_tokenizer_settings, "tokenizer"),
        (change_template, "template"),
        (move_template_to_its_own_file_and_change_it, "template"),
        (change_config, "config"),
    ],
)
async def test_a_model_changed_since_sleep_is_refused_and_the_part_named_threats_53_to_56(
    open_rig: Any, store: Path, own_tiny_model: Path, change: Any, field: str
) -> None:
    async with open_rig(own_tiny_model) as rig:
        await sleeping(rig)
        stored = dict(rig.model.identity.parts)
    change(own_tiny_model)
    async with open_rig(own_tiny_model) as rig:
        live = dict(rig.model.identity.parts)
        error = await refused(rig, store)
    assert isinstance(error, IdentityMismatch)
    assert error.code == "identity_mismatch"
    assert error.mismatched_fields == [
        {"field": field, "stored": stored[field], "live": live[field], "policy": "must_match"}
    ]
    assert field in error.message
    assert stored[field] != live[field]


async def test_a_model_put_back_as_it_was_wakes_again(open_rig: Any, own_tiny_model: Path) -> None:
    path = own_tiny_model / "tokenizer_config.json"
    original = path.read_bytes()
    async with open_rig(own_tiny_model) as rig:
        await sleeping(rig)
    change_template(own_tiny_model)
    async with open_rig(own_tiny_model) as rig:
        with pytest.raises(IdentityMismatch):
            await rig.wake("a")
    path.write_bytes(original)
    async with open_rig(own_tiny_model) as rig:
        assert (await rig.wake("a")).token_count == 600


async def test_weights_rewritten_under_the_daemon_leave_the_loaded_model_and_its_identity_alone_threat_53(
    open_rig: Any, own_tiny_model: Path
) -> None:
    """All weights are in memory, and a sleep carries the identity of what is loaded, not of what is in the folder."""
    async with open_rig(own_tiny_model) as rig:
        await sleeping(rig)
        await rig.read("control", tokens_of(1, 600))
        change_weights(own_tiny_model)
        (own_tiny_model / "model.safetensors").write_bytes(b"")
        await rig.wake("a")
        assert await rig.write("a", 20) == await rig.write("control", 20)


async def test_every_part_that_differs_is_named(open_rig: Any, store: Path, own_tiny_model: Path) -> None:
    async with open_rig(own_tiny_model) as rig:
        await sleeping(rig)
    change_weights(own_tiny_model)
    change_rope(own_tiny_model)
    async with open_rig(own_tiny_model) as rig:
        error = await refused(rig, store)
    assert [part["field"] for part in error.mismatched_fields] == ["weights", "config", "rope"]


async def test_a_session_of_a_model_that_is_not_loaded_is_refused_by_its_name(
    open_rig: Any, store: Path, tiny_model: Path, digest_cache: Path
) -> None:
    async with open_rig() as rig:
        await sleeping(rig)
    service = await Service.open(
        ServeOptions(store=store), models={"other": str(tiny_model)}, digest_cache=digest_cache
    )
    with pytest.raises(UnknownModel, match="'tiny'"):
        await service.wake("a")
    await service.close()


# --- a sound bundle that this version did not write


def hand_made(
    rig: Rigged, session: dict[str, Any], blocks: list[BlockDraft], name: str = "a", identity: Identity | None = None
) -> str:
    """A snapshot with no version of this daemon before it; the name of its session."""
    store: Store = rig.service._parts.store.disk
    store.write_bundle(
        VersionDraft(
            uri=SessionUri("default", name),
            identity=identity or rig.model.identity,
            parent=None,
            reused=(),
            blocks=blocks,
            session=session,
            block_tokens=sum(block.kind == "span" for block in blocks),
        )
    )
    return name


def drafts(rig: Rigged, token: int = 5, *, dtype: str = "float32", state: bool = True) -> list[BlockDraft]:
    """One token's blocks of zeros, as the tiny model lays them out."""

    def zeros(specs: Any) -> list[SlotDraft]:
        return [SlotDraft(spec, [memoryview(bytes(spec.size_bytes))]) for spec in specs]

    specs = [SlotSpec(spec.name, spec.kind, dtype, spec.shape) for spec in rig.model.layout.span_slots(1)]
    span = BlockDraft(kind="span", start=0, tokens=token.to_bytes(4, "little"), slots=zeros(specs))
    *values, passes = rig.model.layout.state_slots(1)
    one_call = SlotDraft(passes, [memoryview(bytes([1, 0, 0, 0, 1, 0, 0, 0]))])
    record = BlockDraft(kind="state", start=1, tokens=b"", slots=[*zeros(values), one_call])
    return [span, record] if state else [span]


GOOD_MAP = {
    "model": MODEL,
    "labels": [],
    "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0},
    "system": None,
    "turn_open": False,
    "created_ns": 1,
}


@pytest.fixture
def no_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a state of zeros pass, which no model has computed."""
    monkeypatch.setattr(canary, "check", lambda *_: "not_run")


@pytest.mark.usefixtures("no_canary")
async def test_a_hand_made_snapshot_that_is_right_in_every_part_wakes(open_rig: Any) -> None:
    """So that the refusals below are for the one thing that each of them does wrong."""
    async with open_rig() as rig:
        assert (await rig.wake(hand_made(rig, GOOD_MAP, drafts(rig)))).token_count == 1


@pytest.mark.usefixtures("no_canary")
async def test_a_session_map_that_this_version_does_not_write_is_refused_gm11(open_rig: Any, store: Path) -> None:
    table = [
        ({"model": "absent"}, "unknown_model"),
        ({"sampling": None}, "malformed_snapshot"),
        ({"sampling": {"temperature": 0.0}}, "invalid_sampling"),
        ({"sampling": {**GOOD_MAP["sampling"], "temperature": -1.0}}, "invalid_sampling"),
        ({"sampling": {**GOOD_MAP["sampling"], "seed": "0"}}, "invalid_sampling"),
        ({"created_ns": "yesterday"}, "malformed_snapshot"),
    ]
    async with open_rig() as rig:
        names = [hand_made(rig, GOOD_MAP | changes, drafts(rig), f"s{at}") for at, (changes, _) in enumerate(table)]
        async with unharmed(rig, store):
            assert [(await refusal_of(rig, name)).code for name in names] == [code for _, code in table]


@pytest.mark.usefixtures("no_canary")
async def test_a_session_map_without_one_of_its_parts_is_refused_gm11(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        for missing in GOOD_MAP:
            hand_made(rig, {key: value for key, value in GOOD_MAP.items() if key != missing}, drafts(rig), missing)
        async with unharmed(rig, store):
            for missing in GOOD_MAP:
                wanted = "unknown_model" if missing == "model" else "malformed_snapshot"
                assert (await refusal_of(rig, missing)).code == wanted


async def test_blocks_that_are_no_state_of_the_model_are_refused_gm4_threat_10_threat_14(
    rig: Rigged, store: Path
) -> None:
    span, record = drafts(rig)
    first = BlockDraft(kind="state", start=0, tokens=b"", slots=record.slots)
    table = {
        "token-outside-the-vocabulary": (drafts(rig, token=259), "malformed_snapshot"),
        "slots-of-another-type": (drafts(rig, dtype="int32"), "layout_mismatch"),
        "state-in-the-middle": ([first, span], "malformed_snapshot"),
        "nothing": ([], "malformed_snapshot"),
        "state-without-tokens": ([first], "malformed_snapshot"),
    }
    for name, (blocks, _) in table.items():
        hand_made(rig, GOOD_MAP, blocks, name)
    async with unharmed(rig, store):
        errors = {name: await refusal_of(rig, name) for name in table}
    assert {name: error.code for name, error in errors.items()} == {name: code for name, (_, code) in table.items()}
    strange: Any = errors["token-outside-the-vocabulary"]
    assert (strange.token, strange.vocabulary) == (259, 259)


async def test_an_identity_of_other_parts_is_refused(rig: Rigged, store: Path) -> None:
    hand_made(rig, GOOD_MAP, drafts(rig), identity=Identity((("colour", "blue"),)))
    error: Any = await refused(rig, store)
    assert error.code == "identity_mismatch"
    assert "colour" in [part["field"] for part in error.mismatched_fields]


async def test_an_identity_of_before_a_part_was_known_is_refused_by_the_parts_that_it_lacks_gm9(
    rig: Rigged, store: Path
) -> None:
    live = dict(rig.model.identity.parts)
    later = {"kv_format", "rope", "state_layout"}
    before = Identity(tuple((part, value) for part, value in live.items() if part not in later))
    hand_made(rig, GOOD_MAP, drafts(rig), identity=before)
    error: Any = await refused(rig, store)
    assert {(each["field"], each["stored"], each["live"]) for each in error.mismatched_fields} == {
        (part, None, live[part]) for part in later
    }


# --- names and locks


async def test_an_unknown_session_is_named_and_close_names_are_suggested(rig: Rigged) -> None:
    await rig.read("archivist", [1])
    for verb in (rig.wake, rig.sleep):
        with pytest.raises(SessionNotFound, match="archivist"):
            await verb("archivits")
    with pytest.raises(SessionNotFound):
        await rig.service.generate("archivits", max_tokens=1)
    with pytest.raises(SessionNotFound):
        await rig.service.append("archivits", text="x")
    with pytest.raises(SessionNotFound):
        await rig.service.show("archivits")
    with pytest.raises(SessionNotFound):
        await rig.service.delete("archivits")


async def test_a_bare_name_means_the_default_namespace_and_no_other_gm5(rig: Rigged) -> None:
    """It reaches no session of another one, and none of those makes it mean anything else."""
    await rig.read_each(("one/agent", "two/agent"), [1, 2])
    await rig.sleep("two/agent")
    for verb in (rig.wake, rig.sleep, lambda name: rig.service.delete(name), lambda name: rig.write(name, 1)):
        with pytest.raises(SessionNotFound) as refusal:
            await verb("agent")
        assert refusal.value.suggestions == []
        assert not any(f"{name}/" in refusal.value.message for name in ("one", "two"))
    await rig.read("agent", [3, 4, 5])
    assert (await rig.service.show("agent")).info.token_count == 3
    assert (await rig.service.delete("agent")).session == "torpor://default/agent"
    assert {info.token_count for info in await rig.service.list_sessions()} == {2}


async def test_a_second_service_on_the_store_is_refused_and_the_first_goes_on_threat_34(
    rig: Rigged, store: Path, tiny_model: Path, digest_cache: Path
) -> None:
    await rig.read("a", [1, 2, 3])
    with pytest.raises(StoreLocked):
        await Service.open(ServeOptions(store=store), models={MODEL: str(tiny_model)}, digest_cache=digest_cache)
    await rig.write("a", 3)
    await rig.sleep("a")


async def test_a_service_whose_model_is_missing_lets_the_store_go_again(open_rig: Any, store: Path) -> None:
    with pytest.raises(ModelUnavailable):
        await Service.open(ServeOptions(store=store), models={MODEL: "/no/such/model"})
    async with open_rig() as rig:
        await rig.read("a", [1])


# --- no room, and disks that fail


class Disk:
    """Does to the writes and flushes of the store what a full or failing disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writev, self.fsync = os.writev, os.fsync
        self.room: int | None = None
        self.broken = False
        monkeypatch.setattr(os, "writev", self._writev)
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _writev(self, fd: int, buffers: list[memoryview]) -> int:
        if self.room is None:
            return self.writev(fd, buffers)
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # A disk that fills up writes less than it is asked to, before it refuses.
        written = self.writev(fd, [memoryview(b"".join(buffers))[: self.room]])
        self.room -= written
        return written

    def _fsync(self, fd: int) -> None:
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.fsync(fd)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    yield Disk(monkeypatch)
    monkeypatch.undo()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("room", [0, 1, 5000, 100_000])
async def test_no_room_for_a_sleep_leaves_session_and_store_as_they_were_threat_30(
    rig: Rigged, store: Path, disk: Disk, room: int
) -> None:
    await sleeping(rig, "old")
    await rig.read_each(("a", "control"), tokens_of(4, 300))
    before, files = await rig.fingerprint("a"), contents(store)
    disk.room = room
    with pytest.raises(NoSpace):
        await rig.sleep("a")
    disk.room = None
    assert contents(store) == files
    assert rig.is_awake("a")
    assert await rig.fingerprint("a") == before
    assert rig.live("a").dirty
    assert await rig.write("a", 20) == await rig.write("control", 20)
    assert (await rig.sleep("a")).version == 1
    assert await rig.woken_fingerprint("a") == await rig.fingerprint("control")


async def test_no_room_for_a_second_sleep_keeps_the_first_version(rig: Rigged, store: Path, disk: Disk) -> None:
    await sleeping(rig)
    files = contents(store)
    await rig.write("a", 5)
    disk.room = 700
    with pytest.raises(NoSpace):
        await rig.sleep("a")
    disk.room = None
    assert contents(store) == files
    second = await rig.sleep("a")
    assert (second.version, second.blocks_reused) == (2, 2)


async def test_a_session_can_be_deleted_when_the_disk_is_full(rig: Rigged, store: Path, disk: Disk) -> None:
    await sleeping(rig)
    disk.room = 0
    await rig.service.delete("a")
    assert contents(store) == {}


@pytest.mark.parametrize("durability", ["turn", "sleep"])
async def test_a_failed_flush_is_never_acknowledged_and_the_session_lives_on_threat_31(
    open_rig: Any, store: Path, disk: Disk, durability: str
) -> None:
    async with open_rig(durability=durability) as rig:
        await rig.read_each(("a", "control"), tokens_of(4, 300))
        disk.broken = True
        with pytest.raises(TorporError) as refusal:
            await rig.sleep("a")
        assert refusal.value.code == "durability_lost"
        disk.broken = False
        with pytest.raises(TorporError) as again:
            await rig.sleep("a")
        assert again.value.code == "durability_lost", "what the kernel kept is unknown until the store is opened again"
        assert manifests(store) == []
        if durability == "sleep":
            assert await rig.write("a", 20) == await rig.write("control", 20)
        else:
            with pytest.raises(DurabilityLost):
                await rig.write("a", 20)
            assert rig.live("a").state.is_consistent
            assert len(rig.live("a").state.tokens) == 300, "no turn begins that could not be acknowledged"
        report = await rig.service.close()
        assert set(report.failed) == {"torpor://default/a", "torpor://default/control"}
    async with open_rig(durability=durability) as rig:
        if durability == "sleep":
            await sleeping(rig)
        else:
            assert (await rig.wake("a")).token_count == 300


@pytest.mark.one_in(5)
async def test_no_room_for_real_under_a_file_size_limit_threat_30(
    store: Path, tiny_model: Path, digest_cache: Path
) -> None:
    script = """
import asyncio, json, resource, sys
from torpor.tests.daemon.session_rig import *

async def main():
    store, model, digests = map(Path, sys.argv[1:])
    async with open_rigged(store, {MODEL: str(model)}, digests) as rig:
        for name in ("a", "control"):
            await rig.read(name, tokens_of(4, 500))  # fewer than are written behind a session while it works
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        try:
            await rig.sleep("a")
        except Exception as error:
            code = error.code
        left = [path.name for folder in ("versions", "packs") for path in (store / folder).iterdir()]
        same = await rig.write("a", 20) == await rig.write("control", 20)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        version = (await rig.sleep("a")).version
        print(json.dumps([code, left, same, version]))

asyncio.run(main())
"""
    arguments = [str(store), str(tiny_model), str(digest_cache)]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["no_space", [], True, 1]
