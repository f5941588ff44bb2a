"""A URL of a remote: what it opens, one sentence for each that is wrong, and never a secret in it."""

from __future__ import annotations

import logging
import shutil
import sys
import traceback
from pathlib import Path

import pytest
from torpor.memvid.errors import InvalidRemote, NotAStore, RemoteError, RemoteUnreachable
from torpor.memvid.recovery.restoring import restore_store_file
from torpor.memvid.remote.cloud_objects import CloudObjects
from torpor.memvid.remote.folder_objects import FolderObjects
from torpor.memvid.remote.opening import open_objects
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import URI, sleep, tree

SECRET = "s3cr3tS3CR3Ts3cr3t"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"AKIA{SECRET}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=1&sig={SECRET}")


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/some/Prefix-1", "az://container/prefix/", "s3://my.bucket_1/a=b"]
)
def test_an_object_store_is_opened_without_asking_it(url: str) -> None:
    with_client = open_objects(url)
    assert isinstance(with_client, CloudObjects)
    assert with_client.url == url.rstrip("/")
    with_client.close()


def test_all_spellings_of_a_place_are_one_remote(tmp_path: Path) -> None:
    """So a head that was seen by one of them is not replayed by another."""
    folder = tmp_path / ("a share, ü%" + "long" * 50)
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    one = folder.as_uri()
    spelled = [
        *(one, f"{one}/", f"{one}//", f"{one}/.", f"{one}/../{one.rpartition('/')[2]}", (tmp_path / "link").as_uri()),
        *(one.replace("file://", form) for form in ("file:///", "FILE://", "file://localhost")),
        f"file://{folder}".replace("%", "%25"),
    ]
    for url in spelled:
        objects = open_objects(url)
        assert objects.url == one
        objects.close()
    for url in ("s3://bucket/some/Prefix", "s3://bucket//some/Prefix//", "S3://bucket/some//Prefix"):
        assert open_objects(url).url == "s3://bucket/some/Prefix"
    assert open_objects("s3://bucket/").url == "s3://bucket"


def test_a_shared_folder_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "a share, ü%"
    folder.mkdir()
    for url in (folder.as_uri(), folder.as_uri().replace("file://", "file://localhost")):
        objects = open_objects(url)
        assert isinstance(objects, FolderObjects)
        objects.create("heads/x", b"1")
        objects.remove("heads/x")
        objects.close()
    assert (folder / "heads").is_dir()
    absent = open_objects((tmp_path / "none").as_uri())  # as an object store that does not answer yet
    with pytest.raises(RemoteUnreachable, match="mounted"):
        absent.place()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "what kind of place"),
        ("bucket/prefix", "what kind of place"),
        ("/mnt/share", "write file:///mnt/share."),
        ("ftp://bucket/prefix", "no remote of that kind"),
        ("https://bucket.s3.amazonaws.com/prefix", "no remote of that kind"),
        ("memory://", "no remote of that kind"),
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3://ab", "names no bucket"),
        ("s3://bucket:9000/prefix", "names no bucket"),
        ("s3://[bucket", "no URL"),
        ("s3://bucket/../up", "a prefix has"),
        ("s3://bucket/a b", "a prefix has"),
        ("s3://bucket/a%2fb", "a prefix has"),
        ("s3://bucket/.hidden", "a prefix has"),
        ("s3://bucket/" + "a/" * 17, "a prefix has"),
        ("s3://bucket/x?region=eu", "belong in the environment"),
        ("s3://bucket/x#y", "belong in the environment"),
        ("file://server/share", "mounted here"),
        ("file:share", "from the root on"),
        ("file:///a%00b", "from the root on"),
        (f"s3://key:{SECRET}@bucket/prefix", "belong in the environment"),
        (f"az://container/prefix?sig={SECRET}", "belong in the environment"),
        (f"s3:/key:{SECRET}@bucket", "belong in the environment"),
        (f"key:{SECRET}@bucket", "is no remote"),
        (f"s3://key:{SECRET}%40bucket/prefix", "is no remote"),
        (f"s3://key:{SECRET}/bucket", "is no remote"),
        (f"s3://bucket/prefix;key={SECRET}", "is no remote"),
        (f"s3:key:{SECRET}:bucket", "is no remote"),
    ],
)
def test_a_wrong_url_is_refused_with_one_sentence(url: str, says: str) -> None:
    with pytest.raises(InvalidRemote, match=says) as refused:
        open_objects(url)
    assert SECRET not in str(refused.value) + repr(refused.value.details)
    assert "@" not in refused.value.url


@pytest.mark.parametrize("place", ["store", "other", "store/packs/within", "link", "."])
def test_a_remote_is_apart_from_every_store(tmp_path: Path, place: str) -> None:
    """It lies in none, is none, and has that of the daemon not in it, by whatever name it goes; nothing is written."""
    (tmp_path / "link").symlink_to(tmp_path / "store")
    Store.open(tmp_path / "other", writable=True).close()
    with Store.open(tmp_path / "store", writable=True) as store:
        (tmp_path / "store" / "packs" / "within").mkdir()
        before = tree(tmp_path)
        with pytest.raises(InvalidRemote, match=r"a store is there|one in the other"):
            store.open_remote(f"file://{tmp_path / place}")
        assert tree(tmp_path) == before
        (tmp_path / "store-2").mkdir()
        store.open_remote(f"file://{tmp_path}/store-2").close()


@pytest.mark.parametrize("told_by", ["opening", "sessions"])
def test_a_remote_is_opened_and_repaired_as_no_store(tmp_path: Path, told_by: str) -> None:
    """Neither as it was opened first, nor as a copy of an object store, which has the objects alone."""
    remote = tmp_path / "remote"
    remote.mkdir()
    FolderObjects(str(remote), remote.as_uri()).place()
    if told_by == "sessions":
        with Store.open(tmp_path / "store", writable=True) as store:
            sleep(store, 5)
            sessions = store.open_remote(remote.as_uri())
            sessions.push(sessions.take(URI))
            sessions.close()
        assert list((remote / "versions").glob("*.mvm"))
        shutil.rmtree(remote / ".unfinished")
    before = tree(remote)
    assert restore_store_file(remote) == ()
    for writable in (True, False):
        with pytest.raises(NotAStore, match=r"is a remote, not a store.*serve --remote file:///.*ls --remote"):
            Store.open(remote, writable=writable)
    assert tree(remote) == before


def test_a_profile_is_refused_with_what_puts_it_into_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "work")
    open_objects("s3://bucket").close()  # for the keys are there
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(InvalidRemote, match="aws configure export-credentials"):
        open_objects("s3://bucket")


def test_what_is_missing_in_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(InvalidRemote, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_objects("az://container")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", f"/nowhere/{SECRET}.json")
    with pytest.raises(InvalidRemote, match="GOOGLE_APPLICATION_CREDENTIALS") as refused:
        open_objects("gs://bucket")
    assert SECRET not in "".join(traceback.format_exception(refused.value))


def test_without_the_extra_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("obstore", "obstore.store", "obstore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidRemote, match=r"pip install 'torpor\[remote\]'"):
        open_objects("s3://bucket")
    open_objects(tmp_path.as_uri()).close()  # which needs none


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "az://container/prefix"])
def test_no_secret_is_in_a_message_or_a_log(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody listens there. What obstore says of it has the signed address of Azure in it."""
    for name in ("AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setattr("torpor.memvid.remote.cloud_objects._RETRIES", 0)
    caplog.set_level(logging.DEBUG)
    objects = open_objects(url)
    told = []
    for ask in (
        lambda: objects.get("torpor.json", 10),
        lambda: objects.size("torpor.json"),
        lambda: objects.create("torpor.json", b"1"),
        lambda: objects.replace("torpor.json", b"1", "tag"),
        lambda: objects.put("torpor.json", [b"1"], 1),
        lambda: objects.put("torpor.json", [b"1" * (6 << 20)], 6 << 20),
        lambda: objects.remove("torpor.json"),
        lambda: list(objects.entries("heads/")),
        lambda: list(objects.get_ranges([("packs/1", 0, 10)])),
    ):
        with pytest.raises(RemoteError) as refused:
            ask()
        told += traceback.format_exception(refused.value)
        told.append(repr(refused.value.details))
    told += [caplog.text, *capfd.readouterr(), repr(objects)]
    assert len(told) > 9
    assert SECRET not in "".join(told)
    assert "Debug source" not in "".join(told), "what obstore says is not repeated"


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("AWS_ENDPOINT_URL", "s3"), ("AWS_ENDPOINT_URL_S3", "s3"), ("GOOGLE_BASE_URL", "gs"), ("AZURE_ENDPOINT", "az")],
)
def test_an_endpoint_says_how_it_is_spoken_to(name: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package for object stores panics at the first request else. What the variable has is not repeated."""
    monkeypatch.setenv(name, "127.0.0.1:4577")
    with pytest.raises(InvalidRemote, match=f"{name} must begin with http:// or https://") as refused:
        open_objects(f"{scheme}://agents/torpor")
    assert "4577" not in str(refused.value)
