"""`/metrics`: the figures of `status`, those of the daemon's events, and counts of requests over HTTP, for Prometheus.

Each number of the record of `status` is a gauge, so a new field of that record is a new gauge: `torpor_` and the names
on the way to it. Those of a model have its name as a label. `figures.py` has a sentence for each. Histograms and
counters of events and requests are those of `daemon/events/figures.py`; none has a session's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response

from ...daemon.api.process import StatusRequest, StatusResult
from ...daemon.api.verbs import VERBS
from ...daemon.events.figures import Figures
from .figures import SENTENCES


class Counters:
    """Counts since the server began."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "torpor_http_requests", "Answers over HTTP.", ("route", "status"), registry=self.registry
        )
        self.working = Gauge(
            "torpor_http_working", "Requests over HTTP that the daemon carries out.", registry=self.registry
        )
        self.tokens = Counter(
            "torpor_http_tokens",
            "Tokens of answers over HTTP: of prompts those that were not read, as a session had them (reused), and "
            "those that were read; of these those that its session had in their places (recomputed); and written ones.",
            ("model", "kind"),
            registry=self.registry,
        )


class _Status:
    """A collector of one `status`."""

    def __init__(self, status: StatusResult) -> None:
        self._status = status

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, model, value in _numbers("torpor", self._status):
            labels = ["model"] if model else []
            sentence = SENTENCES.get(name.removeprefix("torpor_"), "A figure of the verb `status`.")
            family = families.setdefault(name, GaugeMetricFamily(name, sentence, labels=labels))
            family.add_metric([model] if model else [], value)
        yield from families.values()


class _OfEvents:
    """A collector of the figures of the daemon's events."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[HistogramMetricFamily | CounterMetricFamily]:
        for name, kind in self._figures.histograms.items():
            family = HistogramMetricFamily(f"torpor_{name}", kind.sentence, labels=[kind.label] if kind.label else [])
            for label, one in sorted(kind.of.items()):
                upto = accumulate(one.counts)
                bounds = [*map(floatToGoString, one.bounds), "+Inf"]
                family.add_metric([label] if kind.label else [], list(zip(bounds, upto, strict=True)), one.total)
            yield family
        for name, (sentence, label, counts) in self._figures.counters.items():
            counter = CounterMetricFamily(f"torpor_{name}", sentence, labels=[label])
            for value, count in sorted(counts.items()):
                counter.add_metric([value], count)
            yield counter


async def status_of(request: Request) -> StatusResult:
    """The daemon's `status`, for a request."""
    status: StatusResult = await request.app.state.desk.works.answer(VERBS["status"], StatusRequest(), request.receive)
    return status


async def metrics(request: Request) -> Response:
    """The answer of `/metrics`. Raises HttpRefused: the caller may not be told of all namespaces."""
    request.state.caller.require_owner()
    desk = request.app.state.desk
    registry = CollectorRegistry()
    registry.register(_Status(await status_of(request)))
    registry.register(_OfEvents(desk.backend.figures))
    return Response(generate_latest(registry) + generate_latest(desk.counters.registry), media_type=CONTENT_TYPE_LATEST)


def _numbers(prefix: str, record: Any, model: str = "") -> Iterator[tuple[str, str, float]]:
    """The numbers of a record and of the records in it: their names, their model, and their values."""
    for each in fields(record):
        value, name = getattr(record, each.name), f"{prefix}_{each.name}"
        if isinstance(value, (bool, int, float)) and each.name != "pid":
            yield name, model, float(value)
        elif is_dataclass(value):
            yield from _numbers(name, value)
        elif each.name == "models":
            for one in value:
                yield from _numbers(f"{prefix}_model", one, one.name)
