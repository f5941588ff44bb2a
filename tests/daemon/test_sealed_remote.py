"""Daemons that keep their sessions in a sealed remote: what they do there, and what others find in it."""

from __future__ import annotations

import os
import platform
import struct
from pathlib import Path

import pytest
from torpor.memvid.errors import InvalidRemote, RemoteKeyWrong
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.machines import OpenMachine, freed, remote_of
from torpor.tests.daemon.session_rig import MODEL

URI = SessionUri("default", "Confidential-Notes")
TEXT = "The launch of Albatross is on the ninth of May"
TOOLS = [{"name": "open_the_vault", "description": "Opens the vault", "parameters": {"type": "object"}}]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(os.urandom(32).hex())
    return path


def everything(folder: Path) -> bytes:
    """All names and bytes that lie in the remote."""
    paths = [path for path in sorted(folder.rglob("*")) if path.name != ".lock"]
    names = b"\0".join(str(path.relative_to(folder)).encode() for path in paths)
    return names + b"".join(path.read_bytes() for path in paths if path.is_file())


@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "plain"])
async def test_a_session_moves_and_who_holds_the_remote_finds_nothing_of_it(
    machine: OpenMachine, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_sealed: bool
) -> None:
    """Not its name, its text or its tokens, the names of tools, models and machines, nor ids of versions. In a plain
    remote the same search finds each."""
    monkeypatch.setattr(platform, "node", lambda: "notebook-of-ana")
    options = {"remote_turns": 0.0} | ({"remote_key": key} if is_sealed else {})
    async with machine("one", **options) as one:
        await one.service.create(URI.name, system=TEXT, tools=TOOLS)
        await one.service.append(URI.name, text=TEXT)
        state, during = await one.fingerprint(URI.name), everything(tmp_path / "shared")
        await one.sleep(URI.name)
        await freed(one, URI)
        head, party = await remote_of(one).head(URI), remote_of(one).sessions.me
        assert head is not None
        assert head.newest is not None
    found = during + everything(tmp_path / "shared")
    told = {
        "name": URI.name.lower().encode(),
        "tool": b"open_the_vault",
        "text": TEXT.encode(),
        "tokens": struct.pack("<8I", *state.tokens[-8:]),
        "model": MODEL.encode(),
        "machine": party.machine.encode(),
        "store": party.store.encode(),
        "version": head.newest.encode(),
        "its bytes": bytes.fromhex(head.newest),
    }
    assert {what for what, data in told.items() if data in found} == (set() if is_sealed else set(told))
    async with machine("two", **options) as two:
        await two.wake(URI.name)
        assert await two.fingerprint(URI.name) == state
        listed, use = await two.service.remote(), (await two.service.status()).remote
        assert [each.session for each in listed.sessions] == [str(URI)]
        assert use is not None
        assert (listed.sealed, use.sealed) == (is_sealed, is_sealed)


async def test_a_daemon_does_not_start_on_a_remote_with_another_key(
    machine: OpenMachine, key: Path, tmp_path: Path
) -> None:
    """Nor on a sealed one without a key, nor with a key that others may read; and its store is free again."""
    async with machine("one", remote_key=key):
        pass
    other = tmp_path / "other"
    other.touch(0o600)
    other.write_text("0" * 64)
    before = everything(tmp_path / "shared")
    for options, refusal in (
        ({}, RemoteKeyWrong),
        ({"remote_key": other}, RemoteKeyWrong),
        ({"remote_key_command": f"cat {other}"}, RemoteKeyWrong),
        ({"remote_key": key, "remote_key_command": "echo"}, InvalidRemote),
        ({"remote_key": tmp_path}, InvalidRemote),
    ):
        with pytest.raises(refusal):
            async with machine("one", **options):
                pass
    assert everything(tmp_path / "shared") == before
    async with machine("one", remote_key_command=f"cat {key}"):
        pass
