"""Models of a hub: downloaded once, on from where a download broke off, and refused in a sentence."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants, file_download
from torpor.daemon.errors import ModelUnavailable
from torpor.daemon.models import hub
from torpor.snapshot.model_files import MAX_SETTINGS_BYTES
from torpor.tests.hub_rig import Hub, serving

NAME = "owner/tiny"
WEIGHTS = "model.safetensors"


@pytest.fixture
def served(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the tiny model. This process uses it, and its cache is empty."""
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
    with serving({NAME: tiny_model}) as served:
        served.used_here(monkeypatch, tmp_path / "cache")
        yield served


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def part_of_weights(tmp_path: Path) -> Path:
    """What a broken download leaves of the weights."""
    (part,) = (tmp_path / "cache").glob("*/blobs/*.incomplete")
    return part


def break_off(served: Hub) -> None:
    """Download a third of the weights."""
    served.most_bytes = len(contents(served.models[NAME])[WEIGHTS]) // 3

    def give_up(present: int, total: int) -> None:
        if present > total // 4:
            raise InterruptedError

    with pytest.raises(ModelUnavailable):
        hub.fetch(NAME, give_up)
    served.most_bytes, served.asked = None, []


def test_a_model_is_downloaded_once_and_is_there_without_a_network_then(served: Hub, tiny_model: Path) -> None:
    reports: list[tuple[int, int]] = []
    assert hub.cached(NAME) is None
    folder = hub.fetch(NAME, lambda *report: reports.append(report))
    assert contents(folder) == contents(tiny_model)
    size = sum(map(len, contents(tiny_model).values()))
    assert (reports[-1], {total for _, total in reports}) == ((size, size), {size})
    assert reports == sorted(reports)
    assert len(reports) > 2 * len(served.asked), "also within a file"
    served.models.clear()
    assert hub.cached(NAME) == folder


@pytest.mark.parametrize(
    ("change", "first_byte"),
    [
        (lambda part, whole: None, None),
        (lambda part, whole: part.write_bytes(whole), "not asked"),
        (lambda part, whole: part.write_bytes(whole + b"more"), 0),
    ],
    ids=["a third", "whole", "too long"],
)
def test_a_download_goes_on_where_the_last_one_ended(
    served: Hub, tiny_model: Path, tmp_path: Path, change: Callable[[Path, bytes], object], first_byte: int | str | None
) -> None:
    break_off(served)
    part = part_of_weights(tmp_path)
    assert part.stat().st_size > 0
    first_byte = part.stat().st_size if first_byte is None else first_byte
    change(part, contents(tiny_model)[WEIGHTS])
    reports: list[int] = []
    folder = hub.fetch(NAME, lambda present, _: reports.append(present))
    assert contents(folder) == contents(tiny_model)
    assert served.asked == ([] if first_byte == "not asked" else [(WEIGHTS, first_byte)])
    assert all(present <= sum(map(len, contents(tiny_model).values())) for present in reports)


def test_a_connection_that_breaks_is_taken_up_again_by_itself(served: Hub, tiny_model: Path) -> None:
    served.most_bytes = len(contents(tiny_model)[WEIGHTS]) // 3
    assert contents(hub.fetch(NAME, hub.untold)) == contents(tiny_model)
    assert len([name for name, first in served.asked if name == WEIGHTS and first]) > 1


def test_a_part_with_other_bytes_is_refused_and_the_next_download_is_right(
    served: Hub, tiny_model: Path, tmp_path: Path
) -> None:
    break_off(served)
    part = part_of_weights(tmp_path)
    part.write_bytes(b"x" * part.stat().st_size)
    inode = part.stat().st_ino
    with pytest.raises(ModelUnavailable, match=r"model.safetensors of owner/tiny came with other bytes"):
        hub.fetch(NAME, hub.untold)
    assert (part.stat().st_ino, part.stat().st_size) == (inode, 0), "another process may wait for its turn at it"
    assert contents(hub.fetch(NAME, hub.untold)) == contents(tiny_model)


def test_a_download_of_another_process_is_told_and_its_end_need_not_be_awaited(served: Hub, tmp_path: Path) -> None:
    break_off(served)
    reports: list[int] = []

    def give_up(present: int, _: int) -> None:
        reports.append(present)
        if present > part_of_weights(tmp_path).stat().st_size:
            raise InterruptedError

    with part_of_weights(tmp_path).open("rb") as others:
        fcntl.flock(others, fcntl.LOCK_EX)
        with pytest.raises(ModelUnavailable):
            hub.fetch(NAME, give_up)
    assert reports
    assert served.asked == []


def test_a_model_that_lacks_a_shard_is_not_taken_for_whole(served: Hub, tmp_path: Path, tiny_model: Path) -> None:
    """As where another program was stopped while it downloaded it."""
    sharded = tmp_path / "sharded"
    shutil.copytree(tiny_model, sharded)
    shards = {"weight_map": {"a": WEIGHTS, "b": "model-2.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(shards))
    served.models = {NAME: sharded}
    hub.fetch(NAME, hub.untold)
    assert hub.cached(NAME) is None


def no_weights(model: Path) -> None:
    (model / WEIGHTS).rename(model / "tiny.gguf")


def other_kind(model: Path, kind: object = "no_such_thing") -> None:
    (model / "config.json").write_text(json.dumps({"model_type": kind}))


def tells(file: str | None = None, **facts: object) -> Callable[[dict[str, Any]], object]:
    """A hub that tells these of a file, or of a model."""
    return lambda info: next((one for one in info["siblings"] if one["rfilename"] == file), info).update(facts)


def no_room(error: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(error, "no")

    return refuse


@pytest.mark.parametrize(
    ("arrange", "words"),
    [
        (
            lambda served, patch, model: served.models.clear(),
            "there is no such model that you may read. Look at its sp",
        ),
        (lambda served, patch, model: setattr(served, "gated", {NAME}), "it is gated. Accept its terms on http"),
        (lambda served, patch, model: no_weights(model), "is no model for mlx-lm: it lacks config.json or weights"),
        (lambda served, patch, model: other_kind(model), "mlx-lm does not know its model_type 'no_such_thing'"),
        (lambda served, patch, model: other_kind(model, ["x"]), "mlx-lm does not know its model_type \"['x']\""),
        (lambda served, patch, model: other_kind(model, "cache"), "mlx-lm does not know its model_type 'cache'"),
        (
            lambda served, patch, model: patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9"),
            "the connection broke",
        ),
        (
            lambda served, patch, model: patch.setattr(constants, "HF_HUB_OFFLINE", True),
            "$HF_HUB_OFFLINE forbids to ask",
        ),
        (
            lambda served, patch, model: patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=99)),
            " KiB more on the disk of ",
        ),
        (lambda served, patch, model: patch.setattr(hub, "http_get", no_room(errno.ENOSPC)), " is full. Make room"),
        (lambda served, patch, model: setattr(served, "change", tells(sha="../../x")), "the hub tells no commit"),
        (lambda served, patch, model: setattr(served, "change", tells("config.json", size=9)), "does not end: http"),
        (
            lambda served, patch, model: setattr(served, "change", tells("config.json", size=-9)),
            "tells no size or digest",
        ),
        (
            lambda served, patch, model: setattr(served, "change", tells("config.json", size=MAX_SETTINGS_BYTES + 1)),
            "its config.json has more than 32.0 MiB",
        ),
    ],
    ids=[
        "no name",
        "gated",
        "no weights",
        "other kind",
        "a list",
        "no kind",
        "no network",
        "offline",
        "no room",
        "full",
        "path",
        "endless",
        "no size",
        "long",
    ],
)
def test_a_model_that_cannot_be_had_says_why_in_a_sentence(
    served: Hub,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arrange: Callable[[Hub, pytest.MonkeyPatch, Path], object],
    words: str,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    served.models = {NAME: model}
    arrange(served, monkeypatch, model)
    with pytest.raises(ModelUnavailable) as refusal:
        hub.fetch(NAME, hub.untold)
    assert words in refusal.value.message
    assert "\n" not in refusal.value.message
    assert "Traceback" not in refusal.value.message
    assert all(name != WEIGHTS for name, _ in served.asked), "before anything large is downloaded"
