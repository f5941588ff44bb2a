"""Read, read again, reused, taken over and written: one definition of each, and one name of each cause, whoever tells.

One set of requests of each kind, told by `why`, `why --all`, `/metrics`, `top` and the answers themselves.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from torpor.cli.registry import run
from torpor.cli.view.live import Live
from torpor.socket_api import Client
from torpor.tests.socket_api.http.serving import Served, serving

LONG: Final = "The sluice of the north lock is opened by hand, at the second bell. " * 12
SYSTEM: Final = {"role": "system", "content": f"It is 06:30. {LONG}"}
LATER: Final = {"role": "system", "content": f"It is 07:45. {LONG}"}
HELLO: Final = {"role": "user", "content": "Hello!"}
FIGURES: Final = ("read_tokens", "read_again_tokens", "reused_tokens", "taken_over_tokens", "written_tokens")


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, list[dict[str, Any]]]]:
    """A daemon that has answered each kind of request, and the usages of its answers over HTTP."""
    folder = tmp_path_factory.mktemp("d")
    with serving(folder) as served:
        headers = {"x-api-key": served.token}
        with httpx2.Client(base_url=served.url, headers=headers, timeout=60) as http:

            def answer(session: str, *messages: dict[str, str]) -> tuple[str, dict[str, Any]]:
                body = {"model": "demo", "messages": messages, "max_tokens": 4}
                told = http.post("/v1/chat/completions", json=body, headers={"x-torpor-session": session})
                assert told.status_code == 200, told.text
                return told.json()["choices"][0]["message"]["content"], told.json()["usage"]

            said, cold = answer("a", SYSTEM, HELLO)
            turn = [SYSTEM, HELLO, {"role": "assistant", "content": said}, HELLO]
            _, goes_on = answer("a", *turn)
        with Client(str(served.socket.with_name("t.sock"))) as daemon:
            daemon.append("part", text=f"{LONG} And so on.", create=True)
            daemon.append("again", text=f"{LONG} But not there.", create=True)
            daemon.append("short", text=LONG[:400], create=True)
            daemon.append("new", text="Nothing else begins so, and there is little of it.", create=True)
            daemon.chat("rw", messages=[SYSTEM, HELLO], create=True, max_tokens=3)
            daemon.sleep("rw")
            daemon.chat("rw", messages=[LATER, HELLO], on_divergence="rewind", max_tokens=3)
            daemon.chat(
                "rw", messages=[LATER, {**HELLO, "content": "Who is it?"}], on_divergence="rewind", max_tokens=3
            )
            for name in ("again", "part"):
                daemon.sleep(name)
                daemon.maintain(operation="strip", session=name)
            daemon.wake("again")
            daemon.append("part", text=" More.")
            daemon.fork("part", "fork", at_token=100)
        yield served, [cold, goes_on]


def told_by_http(served: Served, path: str) -> Any:
    return httpx2.get(f"{served.url}{path}", headers={"x-api-key": served.token}, timeout=60).json()


def test_all_fronts_tell_the_same_of_each_cause(worked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served, _ = worked
    rows = {row["key"]: row for row in told_by_http(served, "/v1/why?by=cause")["rows"]}
    assert {"new", "hit", "no_whole_block", "clock", "message", "stripped", "recomputed"} <= rows.keys()
    assert (rows["new"]["read_again_tokens"], rows["stripped"]["read_again_tokens"] > 150) == (0, True)
    assert rows["clock"]["read_tokens"] > rows["clock"]["read_again_tokens"] > 150, "all but the time stood there"

    socket = str(served.socket.with_name("t.sock"))
    assert run(["why", "--all", "--json", "--socket", socket]) == 0
    assert {row["key"]: row for row in json.loads(capsys.readouterr().out)["rows"]} == rows

    metrics = httpx2.get(f"{served.url}/metrics", headers={"x-api-key": served.token}).text
    samples = [one for each in text_string_to_metric_families(metrics) for one in each.samples]
    again = {one.labels["cause"]: one.value for one in samples if one.name == "torpor_tokens_read_again_total"}
    assert again == {key: row["read_again_tokens"] for key, row in rows.items() if row["read_again_tokens"]}
    kinds = {one.labels["kind"]: one.value for one in samples if one.name == "torpor_tokens_total"}
    assert kinds == {kind: sum(row[f"{kind}_tokens"] for row in rows.values()) for kind in kinds}
    over_http = {one.labels["kind"]: one.value for one in samples if one.name == "torpor_http_tokens_total"}
    of_clients = [row for row in told_by_http(served, "/v1/why?by=client")["rows"] if row["key"]]
    for kind in ("reused", "read", "written"):
        assert over_http[kind] == sum(row[f"{kind}_tokens"] for row in of_clients)

    live, of_prompts = Live(), dict[str, Counter[str]]()
    with Client(socket) as daemon:
        for info in daemon.list_sessions().sessions:
            requests = daemon.why(info.session).requests
            live.take_reuses(info.session, requests)
            for cost in [each.cost for each in requests if each.cost is not None]:
                of_prompts.setdefault(cost.cause, Counter()).update({name: getattr(cost, name) for name in FIGURES})
    for cause in rows.keys() - {"sleep"}:  # no prompt, and nothing was read
        assert {name: of_prompts[cause][name] for name in FIGURES} == {name: rows[cause][name] for name in FIGURES}
    missed = Counter[str]()
    for miss in live.misses:
        missed[miss.cause.partition(" ")[0]] += miss.tokens
    assert missed == {key: figures["read_again_tokens"] for key, figures in of_prompts.items() if key in missed}
    assert missed.keys() == {key for key, figures in of_prompts.items() if figures["read_again_tokens"]}


def test_a_command_has_the_word_and_the_counts_of_the_page(worked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served, _ = worked
    for name in ("a", "part", "again", "short", "new", "rw"):
        assert run(["why", name, "--socket", str(served.socket.with_name("t.sock"))]) == 0
        shown = capsys.readouterr().out
        for request in told_by_http(served, f"/v1/sessions/{name}/why")["requests"]:
            cost = request["cost"]
            again = f" ({cost['read_again_tokens']:,} again)" if cost["read_again_tokens"] else ""
            assert f"{request['verb']}  {cost['cause']}:" in shown
            assert f"read {cost['read_tokens']:,}{again}, wrote {cost['written_tokens']}" in shown


def test_the_usage_of_an_answer_is_what_its_request_read(worked: Any) -> None:
    served, usages = worked
    costs = [each["cost"] for each in told_by_http(served, "/v1/sessions/a/why")["requests"]]
    for usage, cost in zip(usages, costs, strict=True):
        details = usage["prompt_tokens_details"]
        assert usage["prompt_tokens"] - details["cached_tokens"] == cost["read_tokens"]
        assert (details["cached_tokens"], details["recomputed_tokens"]) == (
            cost["reused_tokens"],
            cost["recomputed_tokens"],
        )
        assert usage["completion_tokens"] == cost["written_tokens"]
