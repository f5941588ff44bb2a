"""The invariants of docs/reference/invariants.md, by their ids, as a client sees them: a real daemon on the
demo model, over its socket. What has to fail inside the daemon is in `test_invariants_failures.py`."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torpor.cli.registry import run
from torpor.daemon.api.events import ProgressEvent, TokenEvent
from torpor.daemon.api.limits import MAX_MESSAGES
from torpor.daemon.api.reading import GenerateResult
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.engine.generation import PREFILL_CHUNK_TOKENS as CALL
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.socket_api import AsyncClient, Client, RemoteError
from torpor.socket_api.client.blocking import blocking_link, wait
from torpor.socket_api.client.link import Link
from torpor.socket_api.errors import LocalProtocolError
from torpor.socket_api.limits import MAX_REQUEST_FRAME_BYTES
from torpor.socket_api.wire.asking import remote_error
from torpor.socket_api.wire.messages import ErrorMessage, ResultMessage
from torpor.tests.socket_api.real_daemon import Asked, RealDaemon, served, tokens_of, until

pytestmark = pytest.mark.timeout(180)

CONTEXT_TOKENS = 8192
SAMPLED = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=11)
PENALISED = Sampling(repetition_penalty=1.3)


@pytest.fixture
def link(daemon: RealDaemon) -> Iterator[Link]:
    connected = blocking_link(daemon.socket, timeout_s=120)
    yield connected
    wait(connected.close())


def written(result: GenerateResult) -> tuple[Any, ...]:
    """What a generation gave, to the bit."""
    return result.tokens, result.text, result.logits_blake3, result.final_logits_blake3, result.finish_reason


def refused(action: Callable[[], object]) -> RemoteError:
    with pytest.raises(RemoteError) as refusal:
        action()
    return refusal.value


# --- quant.cpp, the audit


@pytest.mark.one_in(3)
def test_qc2_a_session_that_is_deleted_and_made_again_is_a_new_one(torpor: Client) -> None:
    """Nothing of the one before is left: no token, no prefix to take over, no memory, no counter, no history."""
    text, before = tokens_of(2, 600), torpor.status()

    def play() -> tuple[Any, ...]:
        torpor.create("reset", sampling=SAMPLED)
        read = torpor.append("reset", tokens=text)
        first = torpor.generate("reset", max_tokens=6, prove=True)
        torpor.sleep("reset")
        second = torpor.generate("reset", max_tokens=4, prove=True)
        info = torpor.show("reset").info
        outcomes = [each.outcome for each in torpor.why("reset").requests]
        facts = read.cached_tokens, read.prefilled_tokens, info.token_count, info.resident_bytes, outcomes
        return written(first), written(second), facts

    first = play()
    torpor.delete("reset")
    assert refused(lambda: torpor.show("reset")).code == "session_not_found"
    after = torpor.status()
    assert after.memory.sessions_bytes == before.memory.sessions_bytes
    assert (after.sessions_awake, after.sessions_asleep) == (before.sessions_awake, before.sessions_asleep)
    assert play() == first


@pytest.mark.one_in(1)
def test_qc3_a_stream_and_a_blocking_call_begin_alike(torpor: Client) -> None:
    """The same text and the same number of tokens, whichever comes first, and the pieces make up the whole."""
    replies = {}
    for name, streams in (("mixed", (True, False)), ("blocking", (False, False))):
        torpor.create(name, sampling=SAMPLED, system="You are brief.")
        said = []
        for message, streamed in zip(("Tell me of the sea.", "And of the sky?"), streams, strict=True):
            if streamed:
                stream = torpor.stream_chat(name, message, max_tokens=12)
                assert "".join(stream) == stream.result.text
                result = stream.result
            else:
                result = torpor.chat(name, message, max_tokens=12)
            said.append((*written(result), result.token_count, result.prefilled_tokens))
        replies[name] = said
    assert replies["mixed"] == replies["blocking"]


@pytest.mark.one_in(1)
def test_qc5_every_way_in_tells_of_an_overflow_with_both_sizes(
    daemon: RealDaemon, torpor: Client, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The blocking client, the asynchronous one and the command line: a typed error, and never an empty reply."""
    torpor.create("over")
    torpor.append("over", tokens=tokens_of(5, 40))
    long = "so many words " * 20_000
    facts = {"token_count": 40, "context_tokens": CONTEXT_TOKENS}

    async def asynchronous() -> None:
        async with AsyncClient(daemon.socket) as client:
            await client.generate("over", max_tokens=2, text=long)

    file = tmp_path / "long.txt"
    file.write_text(long)
    for action in (
        lambda: torpor.append("over", text=long),
        lambda: torpor.generate("over", max_tokens=CONTEXT_TOKENS),
        lambda: torpor.chat("over", long, max_tokens=2),
        lambda: asyncio.run(asynchronous()),
    ):
        refusal = refused(action)
        assert refusal.code == "context_overflow"
        assert refusal.details["wanted_tokens"] + 40 > CONTEXT_TOKENS
        assert {name: refusal.details[name] for name in facts} == facts
    transcript = [{"role": "user", "content": long}]
    rewinding = refused(lambda: torpor.chat("over", messages=transcript, max_tokens=2, on_divergence="rewind"))
    assert (rewinding.code, rewinding.details["token_count"]) == ("context_overflow", 0)
    for arguments in (("append", "over", "--file", str(file)), ("chat", "over", long), ("generate", "over", long)):
        status = run([*arguments, "--socket", str(daemon.socket), "--json"])
        told = capsys.readouterr()
        assert (status, told.out) == (2, "")
        error = json.loads(told.err)["error"]
        assert error["code"] == "context_overflow"
        assert {name: error["details"][name] for name in facts} == facts


@pytest.mark.one_in(1)
@pytest.mark.parametrize("method", ["append", "generate", "chat"])
def test_qc6_qx17_an_overflow_is_refused_before_any_token_and_the_session_goes_on(
    link: Link, torpor: Client, method: str
) -> None:
    """One error frame and nothing before it; then the session writes what one writes that was never asked so much."""
    name = f"full-{method}"
    for each in (name, f"{name}-control"):
        torpor.create(each, sampling=SAMPLED)
        torpor.append(each, tokens=tokens_of(6, 30))
    asked = {
        "append": {"tokens": tuple(tokens_of(6, CONTEXT_TOKENS - 29))},
        "generate": {"max_tokens": CONTEXT_TOKENS - 29},
        "chat": {"message": "How are you?", "max_tokens": CONTEXT_TOKENS - 30},
    }[method]
    overlong = Asked(link, method, {"session": name, **asked})
    answer = overlong.answer()
    assert isinstance(answer, ErrorMessage)
    assert (answer.error.code, overlong.events) == ("context_overflow", [])
    assert torpor.show(name).info.token_count == 30
    told, control = (torpor.chat(each, "How are you?", max_tokens=6, prove=True) for each in (name, f"{name}-control"))
    assert written(told) == written(control)
    assert answer.error.message not in told.text
    transcript = [
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": told.text},
        {"role": "user", "content": "Why?"},
    ]
    assert refused(lambda: torpor.chat(name, messages=transcript, max_tokens=1)).code == "transcript_diverged"


def test_qc6_what_ends_just_at_the_context_is_no_overflow(torpor: Client) -> None:
    """The limit itself is served: the bound is not one too low."""
    torpor.create("brim")
    torpor.append("brim", tokens=tokens_of(6, 30))
    with torpor.stream_generate("brim", max_tokens=CONTEXT_TOKENS - 30) as stream:
        next(stream)


def test_qc12_a_client_asks_once_and_never_makes_a_request_smaller_by_itself(
    daemon: RealDaemon, torpor: Client
) -> None:
    """A turn that is larger than the context is one request, refused whole; the daemon hears of no second one."""
    torpor.create("once")
    torpor.append("once", tokens=tokens_of(12, 20))
    with Client(daemon.socket) as watching, watching.events(["request_accepted"], session="once") as events:
        refusal = refused(lambda: torpor.chat("once", "more " * 40_000, max_tokens=4))
        torpor.sleep("once")
        verbs = [next(events).facts["verb"] for _ in range(2)]
    assert refusal.code == "context_overflow"
    assert verbs == ["chat", "sleep"]
    offered = refused(lambda: torpor.generate("once", max_tokens=CONTEXT_TOKENS))
    assert "fold the session into a smaller one" in offered.message
    assert torpor.show("once").info.token_count == 20, "no turn of it was dropped to make room"


@pytest.mark.one_in(1)
def test_qc15_after_a_stream_that_was_cut_off_the_model_is_loaded_anew_and_serves(
    daemon: RealDaemon, torpor: Client
) -> None:
    """Nothing says for ever that the model is in use."""
    for name in ("cut", "cut-control"):
        torpor.create(name, sampling=SAMPLED.changed(Sampling(seed=5)))  # which draws no end soon
        torpor.append(name, tokens=tokens_of(15, 40))
    with Client(daemon.socket) as leaving:
        stream = leaving.stream_generate("cut", max_tokens=4000)
        next(stream)
        assert refused(lambda: torpor.unload_model("demo")).code == "model_in_use"
    held = torpor.show("cut").info.token_count
    assert 40 < held < 4040
    assert not torpor.unload_model("demo").resident
    assert torpor.load_model("demo").resident
    torpor.generate("cut-control", max_tokens=held - 40)
    after = [written(torpor.generate(name, max_tokens=6, prove=True)) for name in ("cut", "cut-control")]
    assert after[0] == after[1]


@pytest.mark.one_in(1)
def test_qc16_warm_and_cold_draw_alike(torpor: Client) -> None:
    """The repetition penalty looks back over what was read before a sleep, too: at temperature 0 the tokens of a
    session that stayed awake, of one that was woken, and of one that read the whole ledger anew are the same."""
    text = tokens_of(16, 50) * 3
    torpor.create("warm", sampling=PENALISED)
    torpor.append("warm", tokens=text)
    begun = torpor.generate("warm", max_tokens=12)
    torpor.fork("warm", "cold")
    torpor.create("anew", sampling=PENALISED)
    torpor.append("anew", tokens=[*text, *begun.tokens])
    torpor.create("unpenalised")
    torpor.append("unpenalised", tokens=[*text, *begun.tokens])
    assert torpor.show("cold").info.state == "asleep"
    warm, cold, anew, other = (
        torpor.generate(name, max_tokens=16).tokens for name in ("warm", "cold", "anew", "unpenalised")
    )
    assert warm == cold == anew
    assert other != warm, "or the penalty would change nothing here"


def test_qc17_each_failure_arrives_as_itself(link: Link, torpor: Client) -> None:
    """What is refused for different reasons has different codes, in the daemon's answer and in the client's error."""
    torpor.create("code")
    torpor.create("read")
    torpor.append("read", tokens=[400, 500])
    torpor.sleep("read")
    torpor.create("other/code")
    message = {"role": "user", "content": "x"}
    wrong: dict[str, tuple[str, dict[str, Any]]] = {
        "session_not_found": ("sleep", {"session": "nobody"}),
        "session_exists": ("create", {"session": "code"}),
        "invalid_uri": ("create", {"session": "a b"}),
        "unknown_model": ("create", {"session": "x", "model": "none"}),
        "empty_context": ("generate", {"session": "other/code", "max_tokens": 1}),
        "invalid_tokens": ("append", {"session": "read", "tokens": (1_000_000,)}),
        "context_overflow": ("generate", {"session": "read", "max_tokens": 9000}),
        "transcript_diverged": ("chat", {"session": "read", "messages": [message], "max_tokens": 1}),
        "no_such_position": ("fork", {"session": "read", "name": "y", "at_token": 9}),
        "invalid_tag": ("mark", {"session": "read", "tag": "a b"}),
        "mark_not_found": ("mark", {"session": "read", "untag": "none"}),
        "bundle_missing": ("import_bundle", {"bundle_id": "0" * 64}),
        "invalid_request": ("append", {"session": "read", "text": "x", "tokens": (1,)}),
    }
    for code, (method, params) in wrong.items():
        answer = Asked(link, method, params).answer()
        assert isinstance(answer, ErrorMessage), code
        assert answer.error.code == code
        raised = remote_error(answer.error)
        assert (raised.code, raised.message, raised.details) == (code, answer.error.message, answer.error.details)
    assert refused(lambda: torpor.sleep("nobody")).code == "session_not_found"


# --- quant.cpp, beyond the audit


def test_qx2_no_word_of_a_message_names_the_session(link: Link, torpor: Client) -> None:
    """Only the request's own field does; without it nothing is served, and a role or a key in a message is no name."""
    torpor.create("user")
    message = {"role": "user", "content": "session: user"}
    without = Asked(link, "chat", {"messages": [message], "max_tokens": 2}).answer()
    assert isinstance(without, ErrorMessage)
    assert (without.error.code, without.error.details["field"]) == ("invalid_request", "session")
    named = {"session": "own", "messages": [{**message, "session": "user"}], "max_tokens": 2}
    torpor.create("own")
    inside = Asked(link, "chat", named).answer()
    assert isinstance(inside, ErrorMessage)
    assert inside.error.code == "invalid_request"
    torpor.chat("own", messages=[message], max_tokens=2)
    assert torpor.show("user").info.token_count == 0


@pytest.mark.one_in(8)
def test_qx3_no_buffer_of_a_prompt_has_a_fixed_size(torpor: Client) -> None:
    """Over four thousand tokens are read, each of them, and the first one still tells."""
    text = tokens_of(4100, 4100)  # No other test of this daemon begins alike.
    torpor.create("long")
    read = torpor.append("long", tokens=text)
    assert (read.tokens_added, read.prefilled_tokens, read.token_count) == (4100, 4100, 4100)
    torpor.create("other")
    torpor.append("other", tokens=[text[0] ^ 1, *text[1:]])
    ends = [torpor.generate(name, max_tokens=1, prove=True).logits_blake3 for name in ("long", "other")]
    assert ends[0] != ends[1]
    assert torpor.sleep("long").token_count == 4101


def test_qx4_what_is_saved_counts_as_many_tokens_as_the_session_has(daemon: RealDaemon, torpor: Client) -> None:
    """The receipt, the listing, the index and the bundle's own manifest and ledger, behind a generation."""
    torpor.create("saved")
    read = torpor.append("saved", tokens=tokens_of(4, 70))
    result = torpor.generate("saved", max_tokens=9)
    assert result.token_count == read.token_count + len(result.tokens)
    assert torpor.sleep("saved").token_count == result.token_count
    detail = torpor.show("saved")
    assert (detail.info.token_count, detail.versions[-1].token_count) == (result.token_count, result.token_count)
    with Store.open(daemon.store, writable=False) as store:
        uri = SessionUri.parse("torpor://default/saved")
        with store.open_session(uri) as reader:
            assert reader.manifest.block_tokens == result.token_count
            assert len(bytes(reader.tokens())) == 4 * result.token_count


def test_qx5_what_is_asked_behind_a_load_stands_behind_what_was_saved(torpor: Client) -> None:
    """Nothing is read again, the question is all that is, and the answer is that of a session which never slept."""
    for name in ("loaded", "unsaved"):
        torpor.create(name, sampling=SAMPLED)
        torpor.append(name, text="The harbour master counted 847 million grains. " * 8)
        torpor.generate(name, max_tokens=5)
    held = torpor.sleep("loaded").token_count
    question = " How many were there?"
    answers = [torpor.generate(name, text=question, max_tokens=8, prove=True) for name in ("loaded", "unsaved")]
    assert written(answers[0]) == written(answers[1])
    woken = answers[0].woken
    assert woken is not None
    assert (woken.token_count, woken.tokens_prefilled) == (held, 0)
    assert answers[0].prefilled_tokens == answers[1].prefilled_tokens == answers[0].token_count - held - 8


def test_qx10_long_names_that_begin_alike_are_sessions_of_their_own(torpor: Client) -> None:
    """Sixty-three characters in common are no name in common."""
    stem = "s" * 63
    for last, seed in (("a", 101), ("b", 102)):
        torpor.create(stem + last)
        torpor.append(stem + last, tokens=tokens_of(seed, 20 + seed % 2))
    assert [torpor.sleep(stem + last).token_count for last in "ab"] == [21, 20]
    assert refused(lambda: torpor.show(stem)).code == "session_not_found"


def test_qx12_one_more_than_a_limit_is_refused_and_nothing_of_it_is_read(link: Link, torpor: Client) -> None:
    """A frame and a transcript: neither is cut to what would fit, and the connection serves on."""
    torpor.create("limit")
    with pytest.raises(LocalProtocolError, match="Send it in smaller parts"):
        torpor.append("limit", text="x" * MAX_REQUEST_FRAME_BYTES)
    messages = ({"role": "user", "content": "x"},) * (MAX_MESSAGES + 1)
    answer = Asked(link, "chat", {"session": "limit", "messages": messages, "max_tokens": 1}).answer()
    assert isinstance(answer, ErrorMessage)
    assert (answer.error.code, answer.error.details["field"]) == ("invalid_request", "messages")
    assert torpor.show("limit").info.token_count == 0


@pytest.mark.one_in(1)
def test_qx14_what_is_damaged_is_refused_whole_and_what_lives_goes_on(daemon: RealDaemon, torpor: Client) -> None:
    """A flipped byte and a cut pack: an error that names it, no session made of it, and another one as it was. With the
    pack as it was, the session wakes."""
    for name in ("hurt", "alive", "alive-control"):
        torpor.create(name, sampling=SAMPLED)
        torpor.append(name, tokens=tokens_of(14, 300))
    before = set((daemon.store / "packs").iterdir())
    torpor.sleep("hurt")
    (file,) = set((daemon.store / "packs").iterdir()) - before
    sound = file.read_bytes()
    for damaged in (sound[:5000] + bytes([sound[5000] ^ 1]) + sound[5001:], sound[: len(sound) // 2]):
        file.chmod(0o600)
        file.write_bytes(damaged)
        refusal = refused(lambda: torpor.wake("hurt"))
        assert refusal.code in ("corrupt_block", "corrupt_bundle", "truncated")
        assert torpor.status().sessions_asleep
        assert [each.state for each in torpor.list_sessions() if each.name == "hurt"] == ["asleep"]
    file.write_bytes(sound)
    after = [written(torpor.generate(name, max_tokens=6, prove=True)) for name in ("alive", "alive-control", "hurt")]
    assert after[0] == after[1] == after[2]


def test_qx15_behind_a_load_every_way_in_checks_the_room_before_it_computes(torpor: Client) -> None:
    """A session that is woken by the request is refused by its length, and is what it was."""
    torpor.create("near", sampling=SAMPLED)
    torpor.append("near", tokens=tokens_of(115, 40))
    torpor.fork("near", "near-control")
    ways = (
        lambda: torpor.append("near", tokens=tokens_of(115, CONTEXT_TOKENS - 39)),
        lambda: torpor.generate("near", max_tokens=CONTEXT_TOKENS - 39),
        lambda: torpor.generate("near", text="Go on.", max_tokens=CONTEXT_TOKENS - 40),
        lambda: torpor.chat("near", "Go on.", max_tokens=CONTEXT_TOKENS - 40),
    )
    for way in ways:
        torpor.sleep("near")
        assert refused(way).code == "context_overflow"
        info = torpor.show("near").info
        assert (info.token_count, info.version, info.dirty) == (40, 1, False)
    after = [written(torpor.generate(name, max_tokens=6, prove=True)) for name in ("near", "near-control")]
    assert after[0] == after[1]


@pytest.mark.one_in(2)
def test_qx16_a_client_that_goes_away_stops_its_generation(daemon: RealDaemon, torpor: Client) -> None:
    """The session is free at once, its ledger is what its KV is, and it goes on as one that wrote just so much."""
    for name in ("left", "left-control"):
        torpor.create(name)
        torpor.append(name, tokens=tokens_of(116, 40))
    with Client(daemon.socket) as leaving:
        stream = leaving.stream_generate("left", max_tokens=4000)
        seen = [next(stream) for _ in range(3)]
    assert seen
    held = torpor.show("left").info.token_count
    assert 40 < held < 300
    torpor.generate("left-control", max_tokens=held - 40)
    assert torpor.sleep("left").token_count == held
    after = [written(torpor.generate(name, max_tokens=6, prove=True)) for name in ("left", "left-control")]
    assert after[0] == after[1]
    assert torpor.generate("left-control", max_tokens=300).finish_reason == "length", "it had not come to its end"


def test_qx18_who_is_told_that_a_session_is_busy_has_changed_nothing(daemon: RealDaemon, torpor: Client) -> None:
    """Not a token of the session, and not how it draws: only those that were let in have an effect."""
    torpor.create("busy")
    torpor.append("busy", tokens=tokens_of(18, 30))

    async def crowd() -> list[Any]:
        async with AsyncClient(daemon.socket) as client, AsyncClient(daemon.socket) as other:
            asked = [
                (client, other)[at % 2].generate("busy", max_tokens=2, sampling=Sampling(seed=at)) for at in range(24)
            ]
            return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(crowd())
    served_ones = [at for at, each in enumerate(answers) if isinstance(each, GenerateResult)]
    turned_away = [each for each in answers if isinstance(each, RemoteError)]
    assert len(served_ones) + len(turned_away) == 24
    assert {each.code for each in turned_away} == {"session_busy"}
    info = torpor.show("busy").info
    assert info.token_count == 30 + sum(len(answers[at].tokens) for at in served_ones)
    assert info.sampling is not None
    assert info.sampling.seed in served_ones


@pytest.mark.one_in(5)
def test_qx18_one_too_many_for_the_whole_daemon_is_told_so_and_nothing_has_happened(tmp_path: Path) -> None:
    """No session is there that was not, none has read or woken, nothing is reserved; and who ends makes room again."""
    with served(tmp_path / "d", "--max-waiting", "1") as daemon, Client(daemon.socket) as client:
        for name in ("busy", "asleep"):
            client.create(name)
            client.append(name, tokens=tokens_of(18, 30))
        client.sleep("asleep")
        links = [blocking_link(daemon.socket, timeout_s=120) for _ in range(2)]
        writing = Asked(links[0], "generate", {"session": "busy", "max_tokens": 4000})
        writing.event()
        assert (client.status().queue.waiting, client.status().queue.limit) == (0, 1)
        waiting = Asked(links[1], "append", {"session": "busy", "tokens": (5,), "priority": "background"})
        until(lambda: client.status().queue.waiting == 1)
        before = client.status()
        refused: list[Callable[[], object]] = [
            lambda: client.create("new"),
            lambda: client.append("asleep", tokens=[7]),
            lambda: client.append("nobody", tokens=[7]),
            lambda: client.generate("asleep", max_tokens=2),
            lambda: client.chat("asleep", "hi", max_tokens=2),
            lambda: client.wake("asleep"),
            lambda: client.fold("asleep", "new", summary="s"),
            lambda: client.fork("asleep", "new"),
        ]
        for ask in refused:
            with pytest.raises(RemoteError) as told:
                ask()
            assert (told.value.code, told.value.details) == ("engine_busy", {"waiting": 1, "limit": 1})
        after = client.status()
        assert (after.sessions_awake, after.sessions_asleep) == (1, 1)
        assert after.memory.reserved_bytes == before.memory.reserved_bytes
        shown = client.show("asleep").info
        assert (shown.state, shown.token_count, shown.version) == ("asleep", 30, 1)
        assert after.queue.waiting == 1
        writing.cancel()
        assert isinstance(waiting.answer(), ResultMessage)
        writing.answer()
        assert client.generate("asleep", max_tokens=2).token_count == 32
        assert client.status().queue.waiting == 0
        for link in links:
            wait(link.close())


# --- go-mlx


def test_gm1_what_is_left_out_is_what_none_is(daemon: RealDaemon, link: Link) -> None:
    """No deadline and no option anywhere: each method serves, and None given stands for nothing given."""
    optional: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "create": ({}, ("model", "sampling", "system")),
        "append": ({"tokens": tuple(tokens_of(1, 20))}, ("text",)),
        "generate": ({"max_tokens": 3}, ("text", "sampling")),
        "chat": ({"message": "Hello", "max_tokens": 3}, ("messages", "sampling")),
        "sleep": ({}, ()),
        "plan_wake": ({}, ("version", "at_token")),
        "wake": ({}, ("version", "at_token")),
        "show": ({}, ()),
        "why": ({}, ()),
        "analyze": ({}, ("kind", "labels")),
    }
    told: list[list[dict[str, Any]]] = []
    for name, spelled in (("omitted", False), ("given", True)):
        told.append([])
        for method, (params, nones) in optional.items():
            asked = Asked(link, method, {"session": name, **params, **(dict.fromkeys(nones) if spelled else {})})
            answer = asked.answer()
            assert isinstance(answer, ResultMessage), (method, answer)
            told[-1].append({key: answer.result.get(key) for key in ("tokens", "text", "token_count", "finish_reason")})
        forked = Asked(link, "fork", {"session": name, "name": f"{name}-fork", **({"labels": None} if spelled else {})})
        assert isinstance(forked.answer(), ResultMessage)
    assert told[0] == told[1]
    with Client(daemon.socket, timeout_s=None) as patient:
        assert patient.generate("omitted", max_tokens=1).token_count == patient.show("omitted").info.token_count


def test_gm5_a_bare_name_means_the_default_namespace_or_the_one_that_the_client_was_given(
    torpor: Client, daemon: RealDaemon
) -> None:
    """And no other, whichever others have that name."""
    torpor.create("one/twin")
    refusal = refused(lambda: torpor.show("twin"))
    assert (refusal.code, refusal.details["suggestions"]) == ("session_not_found", ())
    with Client(daemon.socket, namespace="one") as inside:
        assert inside.show("twin").info.namespace == "one"
        assert inside.create("copy").session == "torpor://one/copy"
        assert {info.namespace for info in inside.list_sessions()} == {"one"}
    torpor.create("two/twin")
    torpor.create("twin")
    assert torpor.show("twin").info.namespace == "default"


@pytest.mark.parametrize("method", ["append", "generate", "chat", "transcript"])
def test_gm7_a_cancel_stops_whatever_reads_and_nothing_of_it_stays(link: Link, torpor: Client, method: str) -> None:
    """A reading of several chunks is stopped at the next one."""
    name = f"stopped-{method}"
    torpor.create(name)
    torpor.append(name, tokens=tokens_of(7, 30))
    long = "a very long story " * 700
    params: dict[str, Any] = {
        "append": {"text": long},
        "generate": {"text": long, "max_tokens": 4},
        "chat": {"message": long, "max_tokens": 4},
        "transcript": {"messages": ({"role": "user", "content": long},), "max_tokens": 4, "on_divergence": "rewind"},
    }[method]
    verb = "chat" if method == "transcript" else method
    asked = Asked(link, verb, {"session": name, **params})
    while not isinstance(first := asked.event(), ProgressEvent) or first.stage != "prefill":
        pass
    assert first.total > 2000
    asked.cancel()
    answer = asked.answer()
    assert isinstance(answer, ErrorMessage)
    assert answer.error.code == "cancelled"
    progress = [each.done for each in asked.events if isinstance(each, ProgressEvent) and each.stage == "prefill"]
    assert progress[-1] <= first.done + max(CALL, first.total // 4)
    assert not any(isinstance(each, TokenEvent) for each in asked.events)
    assert torpor.show(name).info.token_count == 30


def test_gm7_a_cancel_stops_what_writes_and_what_waits_for_its_turn(
    daemon: RealDaemon, link: Link, torpor: Client
) -> None:
    """Within a token; and one that only waits for a session is answered while the other goes on."""
    torpor.create("line")
    torpor.append("line", tokens=tokens_of(77, 30))
    writing = Asked(link, "generate", {"session": "line", "max_tokens": 4000})
    writing.event()
    other = blocking_link(daemon.socket, timeout_s=120)
    waiting = Asked(other, "append", {"session": "line", "text": "never read"})
    waiting.cancel()
    answer = waiting.answer()
    assert isinstance(answer, ErrorMessage)
    assert answer.error.code == "cancelled"
    wait(other.close())
    writing.event()
    writing.cancel()
    stopped = writing.answer()
    assert isinstance(stopped, ErrorMessage)
    tokens = [each.token for each in writing.events if isinstance(each, TokenEvent) and each.token is not None]
    assert list(stopped.error.details["tokens"]) == tokens
    assert stopped.error.details["was_read"] is False
    assert stopped.error.details["token_count"] == 30 + len(tokens)
    assert torpor.show("line").info.token_count == 30 + len(tokens) < 1000


def test_a_generation_from_a_look_that_is_cancelled_tells_that_history_branches(link: Link, torpor: Client) -> None:
    torpor.create("looked")
    torpor.append("looked", tokens=tokens_of(77, 30))
    torpor.sleep("looked")
    torpor.wake("looked", at_token=20)
    writing = Asked(link, "generate", {"session": "looked", "max_tokens": 4000})
    writing.event()
    writing.cancel()
    stopped = writing.answer()
    assert isinstance(stopped, ErrorMessage)
    look = {"version": 1, "token_count": 20, "newest_version": 1, "newest_tokens": 30}
    assert stopped.error.details["branched"] == look
    assert "History branches here: version 1 stays." in stopped.error.message


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", ["append", "generate", "chat"])
def test_gm7_what_a_cancelled_request_says_of_the_session_is_so_wherever_the_cancel_falls(
    daemon: RealDaemon, torpor: Client, method: str
) -> None:
    """QX16. What was answered can be added up. That a cancel falls before the work, in its reading, its writing, and
    behind it is seen to in tests/daemon/engine/test_generation.py."""
    rng, name, held = random.Random(16), f"adds-up-{method}", 30
    torpor.create(name)
    torpor.append(name, tokens=tokens_of(16, held))
    link = blocking_link(daemon.socket, timeout_s=120)
    params: dict[str, Any] = {
        "append": {"text": "short enough"},
        "generate": {"text": "short enough", "max_tokens": 3},
        "chat": {"message": "short enough", "max_tokens": 3},
    }[method]
    for _ in range(40):
        asked = Asked(link, method, {"session": name, **params})
        for _ in range(rng.choice((0, 1, 2, 4, 8, 16, 32, 64))):
            torpor.status()  # a while
        asked.cancel()
        answer = asked.answer()
        if isinstance(answer, ResultMessage):
            held = answer.result["token_count"]
        else:
            assert isinstance(answer, ErrorMessage)
            assert answer.error.code == "cancelled"
            held = answer.error.details.get("token_count", held)
        assert torpor.show(name).info.token_count == held
    wait(link.close())


@pytest.mark.one_in(3)
def test_gm8_what_is_forgotten_is_found_no_more_and_the_others_are(torpor: Client) -> None:
    """In memory, on the disk and among the prefixes; a session beside it is taken over as before."""
    for name, seed in (("gone", 801), ("kept", 802)):
        torpor.create(f"eight/{name}")
        torpor.append(f"eight/{name}", tokens=tokens_of(seed, 600))
    torpor.sleep("eight/gone")
    torpor.maintain("forget", session="eight/gone")
    cached = {}
    for name, seed in (("gone", 801), ("kept", 802)):
        torpor.create(f"eight/like-{name}")
        cached[name] = torpor.append(f"eight/like-{name}", tokens=tokens_of(seed, 600)).cached_tokens
    assert cached == {"gone": 0, "kept": 599}
    assert refused(lambda: torpor.wake("eight/gone")).code == "session_not_found"


@pytest.mark.one_in(3)
def test_gm10_a_hit_gives_what_was_kept_each_time_and_is_counted(torpor: Client) -> None:
    """Twice the same prefix, and twice the same version with its labels and tokens: the second answer is the first."""
    text = tokens_of(10, 600)
    torpor.create("ten/source", labels=("kept", "so"))
    torpor.append("ten/source", tokens=text)
    receipt = torpor.sleep("ten/source")
    counts = []
    for name in ("first", "second"):
        before = torpor.status().prefix_hits
        torpor.create(f"ten/{name}")
        read = torpor.append(f"ten/{name}", tokens=text)
        counts.append((torpor.status().prefix_hits - before, read.cached_tokens, read.prefilled_tokens))
        torpor.delete(f"ten/{name}")
    assert counts == [(1, 599, 1)] * 2
    for _ in range(2):
        assert torpor.wake("ten/source").bundle_id == receipt.bundle_id
        assert torpor.show("ten/source").info.labels == ("kept", "so")
        again = torpor.sleep("ten/source")
        assert (again.version, again.bundle_id, again.token_count) == (receipt.version, receipt.bundle_id, 600)


# --- mlxcel


@pytest.mark.one_in(3)
def test_ms1_what_another_namespace_or_model_has_read_is_not_taken_over(torpor: Client) -> None:
    """Each part of the key tells by itself; the parts of the identity are in tests/snapshot/test_identity.py."""
    text = tokens_of(201, 600)
    torpor.create("m1/source")
    torpor.append("m1/source", tokens=text)
    torpor.create("m2/foreign")
    assert torpor.append("m2/foreign", tokens=text).cached_tokens == 0
    torpor.create("m1/own")
    assert torpor.append("m1/own", tokens=text).cached_tokens == 599


@pytest.mark.one_in(2)
def test_ms2_a_longer_text_is_taken_over_only_as_far_as_it_is_the_same(torpor: Client) -> None:
    """One that ends before the other's text does, and one that leaves it early: both are as if they had read alone."""
    text = tokens_of(202, 900)
    torpor.create("n1/source")
    torpor.append("n1/source", tokens=text)
    for name, same, own in (("shorter", 600, text[:600]), ("leaves", 300, [*text[:300], *tokens_of(203, 300)])):
        alone_in = f"alone-{name}"
        for namespace in ("n1", alone_in):
            torpor.create(f"{namespace}/{name}", sampling=SAMPLED)
            cached = torpor.append(f"{namespace}/{name}", tokens=own).cached_tokens
            assert cached == (0 if namespace == alone_in else same // CALL * CALL)
        shared, alone = (torpor.generate(f"{space}/{name}", max_tokens=6, prove=True) for space in ("n1", alone_in))
        assert written(shared) == written(alone)
        assert shared.token_count == 606


@pytest.mark.one_in(2)
def test_ms5_many_borrow_one_prefix_while_its_source_goes(daemon: RealDaemon, torpor: Client) -> None:
    """Each answers as one that read alone, and the source can be deleted at once: nothing is held for them."""
    text = tokens_of(205, 600)
    torpor.create("b/alone", sampling=SAMPLED)
    torpor.append("b/alone", tokens=text)
    alone = written(torpor.generate("b/alone", max_tokens=5, prove=True))
    torpor.delete("b/alone")
    torpor.create("b/source", sampling=SAMPLED)
    torpor.append("b/source", tokens=text)

    borrowed = []

    def borrow(number: int) -> tuple[Any, ...]:
        with Client(daemon.socket) as client:
            client.create(f"b/{number}", sampling=SAMPLED)
            borrowed.append(client.append(f"b/{number}", tokens=text).cached_tokens)
            if number == 2:
                client.delete("b/source")
            return written(client.generate(f"b/{number}", max_tokens=5, prove=True))

    with ThreadPoolExecutor(4) as clients:
        assert set(clients.map(borrow, range(6))) == {alone}
    assert borrowed[0] == 599, "the first, at least, found the source there"


@pytest.mark.one_in(3)
def test_ms7_a_new_version_frees_nothing_that_a_fork_refers_to(torpor: Client) -> None:
    """The other session goes on, sleeps anew, is pruned, repacked and at last deleted: the fork wakes to
    the bit. A sleep in which nothing is new writes nothing."""
    text = tokens_of(107, 600)
    torpor.create("base", sampling=SAMPLED)
    torpor.append("base", tokens=text)
    torpor.fork("base", "branch")
    torpor.fork("base", "control")
    expected = written(torpor.generate("control", max_tokens=8, prove=True))
    torpor.generate("base", max_tokens=300)
    newer = torpor.sleep("base")
    assert newer.version > 1
    torpor.wake("base")
    repeat = torpor.sleep("base")
    assert (repeat.version, repeat.bytes_written) == (newer.version, 0)
    torpor.maintain("prune", session="base", keep_last=1)
    assert [each.version for each in torpor.show("base").versions] == [newer.version], "the older one has gone"
    torpor.maintain("repack", session="base")
    assert torpor.maintain("repack").problems == ()
    assert torpor.show("branch").info.token_count == 600
    torpor.delete("base")
    torpor.delete("control")
    torpor.maintain("repack")
    branch = torpor.generate("branch", max_tokens=8, prove=True)
    assert branch.woken is not None
    assert branch.woken.tokens_prefilled == 0
    assert written(branch) == expected


@pytest.mark.one_in(4)
def test_ms8_a_look_for_a_prefix_tells_hit_none_or_where_it_left(torpor: Client) -> None:
    """An empty namespace and a foreign session have none; who leaves a text early is told how far both went."""
    text = tokens_of(208, 600)
    for session, ids in (
        ("e1/cold", text),
        ("e2/foreign", text),
        ("e1/early", [*text[:100], *tokens_of(209, 500)]),
        ("e1/same", [*text, 401]),
    ):
        torpor.create(session)
        torpor.append(session, tokens=ids)
    told = {name: torpor.why(name).requests[-1] for name in ("e1/cold", "e2/foreign", "e1/early", "e1/same")}
    assert {name: each.outcome for name, each in told.items()} == {
        "e1/cold": "none",
        "e2/foreign": "none",
        "e1/early": "diverged",
        "e1/same": "hit",
    }
    early = told["e1/early"]
    assert (early.source, early.common_tokens, early.stored_tokens) == ("torpor://e1/cold", 100, 600)


@pytest.mark.one_in(4)
def test_ms10_what_runs_in_the_background_waits_for_quiet_and_takes_nothing_away(tmp_path: Path) -> None:
    """Under load of two clients the scrub reads nothing; what a new session can take over is the same before and behind
    it, and behind a restart, in which the ledgers are learned beside requests."""
    text = tokens_of(210, 600)

    def cached(torpor: Client) -> int:
        torpor.create("probe")
        read = torpor.append("probe", tokens=text)
        torpor.delete("probe")
        return read.cached_tokens

    with served(tmp_path / "s") as daemon, Client(daemon.socket) as torpor:
        torpor.create("source")
        torpor.append("source", tokens=text)
        assert cached(torpor) == 599
    with served(tmp_path / "s") as daemon, Client(daemon.socket) as torpor:
        until(lambda: cached(torpor) == 599)

        def load(name: str) -> list[tuple[int, ...]]:
            with Client(daemon.socket) as client:
                client.create(name, sampling=SAMPLED)
                client.append(name, tokens=tokens_of(211, 40))
                return [client.generate(name, max_tokens=30).tokens for _ in range(6)]

        with ThreadPoolExecutor(2) as clients:
            replies = list(clients.map(load, ("one", "two")))
        assert replies[0] == replies[1]
        scrub = torpor.status().scrub
        assert scrub is not None
        assert (scrub.sessions, scrub.bytes_read) == (0, 0)

        def scrubbed() -> int:
            found = torpor.status().scrub
            assert found is not None
            return found.sessions

        until(lambda: scrubbed() == 1)
        assert cached(torpor) == 599
