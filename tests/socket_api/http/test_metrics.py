"""`/metrics` of a real daemon, read by Prometheus's own parser; and the dashboard asks for what is there alone."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torpor
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from torpor.daemon.events.figures import Histogram
from torpor.tests.socket_api.http.serving import serving

DASHBOARD = Path(torpor.__file__).parent / "docs" / "grafana-dashboard.json"
SYSTEM = {"role": "system", "content": "You are a helpful assistant. It is 06:30. Be brief, and answer in one line."}
HELLO = {"role": "user", "content": "Hello!"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Metric], dict[str, Any]]:
    """The families of a daemon that has done each kind of work, and what `GET /v1/why` says of it."""
    folder = tmp_path_factory.mktemp("d")
    with serving(folder, "--store-budget", "1GB") as served:
        headers = {"x-api-key": served.token, "x-torpor-session": "a", "user-agent": "agent-loop/2.1 (of mine) x"}
        with httpx2.Client(base_url=served.url, headers=headers, timeout=60) as client:

            def chat(*messages: dict[str, str], session: str = "a") -> str:
                body = {"model": "demo", "messages": messages, "max_tokens": 4}
                answer = client.post("/v1/chat/completions", json=body, headers={"x-torpor-session": session})
                assert answer.status_code == 200, answer.text
                return str(answer.json()["choices"][0]["message"]["content"])

            said = chat(SYSTEM, HELLO)
            turn = [SYSTEM, HELLO, {"role": "assistant", "content": said}, HELLO]
            said = chat(*turn)
            assert client.post("/v1/sessions/a/sleep").status_code == 200
            later = {**SYSTEM, "content": SYSTEM["content"].replace("06:30", "07:45")}
            chat(later, HELLO, session="b")
            chat(*turn, {"role": "assistant", "content": said}, HELLO)
            assert client.post("/v1/completions", json={"prompt": " And?", "max_tokens": 2}).status_code == 200
            deadline = time.monotonic() + 60
            while "torpor_disk_coins_stored_bytes " not in (text := client.get("/metrics").text):
                assert time.monotonic() < deadline, "the coins are counted behind the first look"
            why = client.get("/v1/why", params={"by": "client"}).json()
            assert client.get("/v1/why", params={"since": "soon"}).status_code == 400
            assert client.get("/v1/why", params={"since": "1h"}).json()["total"] == why["total"]
    return {each.name: each for each in text_string_to_metric_families(text)}, why


@pytest.mark.one_in(1)
def test_a_real_parser_reads_each_figure_and_its_sums_fit(told: Any) -> None:
    families, _ = told
    assert len(families) > 40
    for name in ("time_to_first_token_seconds", "sleep_seconds", "wake_seconds", "waited_seconds"):
        assert families[f"torpor_{name}"].type == "histogram"
    for family in families.values():
        assert family.documentation
        for sample in family.samples if family.type == "histogram" else ():
            if not sample.name.endswith("_count"):
                continue
            own = [each for each in family.samples if sample.labels.items() <= each.labels.items()]
            buckets = [each for each in own if each.name.endswith("_bucket")]
            values = [each.value for each in buckets]
            assert values == sorted(values), family.name
            assert (buckets[-1].labels["le"], values[-1]) == ("+Inf", sample.value)


def test_the_figures_tell_what_was_done(told: Any) -> None:
    families, why = told

    def value(family: str, sample: str, **labels: str) -> float:
        samples = families[f"torpor_{family}"].samples
        return sum(
            each.value
            for each in samples
            if each.name == f"torpor_{family}{sample}" and labels.items() <= each.labels.items()
        )

    begun = {each: value("time_to_first_token_seconds", "_count", begun=each) for each in ("cold", "reused", "woken")}
    assert begun == {"cold": 2, "reused": 1, "woken": 1}
    assert value("sleep_seconds", "_count", cause="asked") == 1
    assert value("sleep_written_bytes", "_sum") > 1000
    assert value("wake_seconds", "_count") >= 1
    assert value("wake_read_bytes", "_sum") > 1000
    assert value("waited_seconds", "_count") >= 5
    assert value("tokens", "_total", kind="written") == why["total"]["written_tokens"]
    assert value("tokens", "_total", kind="read") == why["total"]["read_tokens"]
    assert value("tokens_read_again", "_total") == why["total"]["read_again_tokens"]
    by = {row["key"]: row["requests"] for row in why["rows"]}
    agent = "agent-loop/2.1"
    assert by == {f"{agent} chat_completions": 4, f"{agent} completions": 1, f"{agent} sessions": 1}


def test_no_label_has_a_sessions_name(told: Any) -> None:
    families, _ = told
    labels = {name for each in families.values() for sample in each.samples for name in sample.labels}
    assert labels == {"begun", "cause", "kind", "le", "model", "route", "status"}


def test_the_dashboard_asks_for_figures_and_labels_that_there_are(told: Any) -> None:
    families, _ = told
    labels_of: dict[str, set[str]] = {}
    for family in families.values():
        for sample in family.samples:
            labels_of.setdefault(sample.name, set()).update(sample.labels)
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    asked = set()
    for query in queries:
        names = set(re.findall(r"torpor_\w+", query))
        assert names, query
        assert names <= labels_of.keys(), query
        (wanted,) = re.findall(r"sum by \(([^)]*)\)", query) or [""]
        labels = {each.strip() for each in wanted.split(",") if each.strip()}
        assert all(labels <= labels_of[name] for name in names), query
        assert set(re.findall(r"(\w+)[=!]~?\"", query)) == {"instance"}, "which Prometheus adds"
        asked |= names
    (variable,) = [each["query"] for each in dashboard["templating"]["list"] if each["name"] == "instance"]
    assert re.findall(r"torpor_\w+", variable)[0] in labels_of
    shown = {re.sub(r"_(bucket|sum|count|total)\Z", "", each) for each in asked}
    ours = {each.name for each in families.values() if each.type in ("histogram", "counter")}
    assert ours - shown <= {"torpor_http_tokens"}, "each figure of events is on the dashboard"


def test_a_value_counts_where_it_is_not_above_the_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for each in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.add(each)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 7.5)
