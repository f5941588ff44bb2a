"""The verbs that both clients offer, as values: a method, its checked parameters, and the type of its result.

Owns the translation from Python arguments to a request and from a reply to a typed result or an error, so that the two
clients differ only in how they wait. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from ..errors import InvalidRequest, MalformedMessage, RemoteError
from . import results
from .messages import ErrorBody
from .methods import METHODS, Priority
from .results import Reply, Sampling

R = TypeVar("R", bound=Reply)
_NAMING = frozenset({"session", "name"})  # the parameters of requests that name a session


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """One request that is ready to be sent."""

    method: str
    params: Mapping[str, Any]
    result: type[R]

    def within(self, namespace: str | None) -> Call[R]:
        """This call as it is made in a namespace (None: in none): bare names are names of it, and what asks about many
        sessions asks about its own."""
        if namespace is None:
            return self
        params = dict(self.params)
        for field in _NAMING & params.keys():
            params[field] = name_in(namespace, params[field])
        if "sessions" in params:
            params["sessions"] = tuple(name_in(namespace, each) for each in params["sessions"])
        narrows = "namespace" in METHODS[self.method].params.model_fields and "session" not in params
        if narrows and (self.method != "warm" or "label" in params):
            params.setdefault("namespace", namespace)
        return replace(self, params=params)

    def load_result(self, raw: Mapping[str, Any]) -> R:
        """Type a result.

        Raises:
            MalformedMessage: the daemon answered with something else.
        """
        try:
            return self.result.model_validate(raw)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise MalformedMessage(
                f"The daemon's result of {self.method} is not what this client knows: {field}: {first['msg']}.",
                field=field,
            ) from None


def name_in(namespace: str, session: str) -> str:
    """What names a session wherever it is asked for: a bare name (perhaps with a version) is one of the namespace."""
    return session if "/" in session else f"{namespace}/{session}"


def remote_error(body: ErrorBody) -> RemoteError:
    """The daemon's failure as an exception of this side."""
    return RemoteError(body.code, body.message, **body.details)


def committed_of(body: ErrorBody) -> dict[str, Any]:
    """What a cancelled generation leaves: the details of the daemon's answer, whose names docs/protocol.md has."""
    return dict(body.details)


def status() -> Call[results.StatusResult]:
    return _call("status", results.StatusResult)


def create(
    session: str, *, model: str | None, labels: Sequence[str], sampling: Sampling | None, system: str | None
) -> Call[results.SessionInfo]:
    return _call(
        "create",
        results.SessionInfo,
        session=session,
        model=model,
        labels=_listed("create", labels),
        sampling=_named(sampling),
        system=system,
    )


def append(
    session: str, *, text: str | None, tokens: Sequence[int] | None, create: bool, priority: Priority
) -> Call[results.AppendResult]:
    ids = None if tokens is None else tuple(tokens)
    return _call(
        "append", results.AppendResult, session=session, text=text, tokens=ids, create=create, priority=priority
    )


def generate(
    session: str,
    *,
    max_tokens: int | None,
    text: str | None,
    sampling: Sampling | None,
    stop: Sequence[str],
    prove: bool,
    create: bool,
    priority: Priority,
) -> Call[results.GenerateResult]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    return _call(
        "generate",
        results.GenerateResult,
        session=session,
        max_tokens=max_tokens,
        text=text,
        sampling=_named(sampling),
        stop=stops,
        prove=prove,
        create=create,
        priority=priority,
    )


def chat(
    session: str,
    message: str | None,
    *,
    max_tokens: int | None,
    role: str,
    messages: Sequence[Mapping[str, str]] | None,
    on_divergence: str,
    sampling: Sampling | None,
    stop: Sequence[str],
    prove: bool,
    create: bool,
    priority: Priority,
) -> Call[results.GenerateResult]:
    return _call(
        "chat",
        results.GenerateResult,
        session=session,
        message=message,
        max_tokens=max_tokens,
        role=role,
        messages=None if messages is None else tuple(messages),
        on_divergence=on_divergence,
        sampling=_named(sampling),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        prove=prove,
        create=create,
        priority=priority,
    )


def set_sampling(session: str, sampling: Sampling) -> Call[results.SessionInfo]:
    return _call("set", results.SessionInfo, session=session, sampling=_named(sampling))


def sleep(session: str) -> Call[results.SleepResult]:
    return _call("sleep", results.SleepResult, session=session)


def wake(session: str, *, version: int | None, at_token: int | None, strict: bool) -> Call[results.WakeResult]:
    return _call("wake", results.WakeResult, session=session, version=version, **_order(at_token, strict=strict))


def plan_wake(session: str, *, version: int | None, at_token: int | None, strict: bool) -> Call[results.WakePlanResult]:
    order = _order(at_token, strict=strict)
    return _call("plan_wake", results.WakePlanResult, session=session, version=version, **order)


def _order(at_token: int | None, *, strict: bool) -> dict[str, Any]:
    given: dict[str, Any] = {} if at_token is None else {"at_token": at_token}
    return given | ({"strict": True} if strict else {})


def fork(session: str, name: str, *, at_token: int | None, labels: Sequence[str] | None) -> Call[results.ForkResult]:
    listed = _listed("fork", labels)
    return _call("fork", results.ForkResult, session=session, name=name, at_token=at_token, labels=listed)


def load_model(model: str) -> Call[results.ModelInfo]:
    return _call("load_model", results.ModelInfo, model=model)


def unload_model(model: str) -> Call[results.ModelInfo]:
    return _call("unload_model", results.ModelInfo, model=model)


def fold(
    session: str,
    name: str,
    *,
    summary: str | None,
    summarise: int | None,
    tail: int,
    labels: Sequence[str] | None,
    priority: Priority,
) -> Call[results.FoldResult]:
    return _call(
        "fold",
        results.FoldResult,
        session=session,
        name=name,
        summary=summary,
        summarise=summarise,
        tail=tail,
        labels=_listed("fold", labels),
        priority=priority,
    )


def list_sessions(namespace: str | None) -> Call[results.ListResult]:
    return _call("list", results.ListResult, namespace=namespace)


def show(session: str) -> Call[results.SessionDetail]:
    return _call("show", results.SessionDetail, session=session)


def why(session: str) -> Call[results.WhyResult]:
    return _call("why", results.WhyResult, session=session)


def delete(session: str) -> Call[results.DeleteResult]:
    return _call("delete", results.DeleteResult, session=session)


def maintain(
    operation: str,
    *,
    session: str | None,
    dry_run: bool,
    keep_last: int | None,
    keep_days: float | None,
    cold_after_days: float | None,
    bits: int | None,
    after_days: float | None,
) -> Call[results.MaintenanceResult]:
    return _call(
        "maintain",
        results.MaintenanceResult,
        operation=operation,
        session=session,
        dry_run=dry_run,
        keep_last=keep_last,
        keep_days=keep_days,
        cold_after_days=cold_after_days,
        bits=bits,
        after_days=after_days,
    )


def analyse(session: str, *, kind: str | None, labels: Sequence[str] | None) -> Call[results.AnalysisResult]:
    return _call("analyse", results.AnalysisResult, session=session, kind=kind, labels=_listed("analyse", labels))


def mark(
    session: str, *, tag: str | None, untag: str | None, pinned: bool | None, move: bool
) -> Call[results.MarksResult]:
    return _call("mark", results.MarksResult, session=session, tag=tag, untag=untag, pinned=pinned, move=move)


def import_bundle(bundle_id: str, *, session: str | None) -> Call[results.SleepResult]:
    return _call("import_bundle", results.SleepResult, bundle_id=bundle_id, session=session)


def stats(label: str | None, namespace: str | None) -> Call[results.StatsResult]:
    return _call("stats", results.StatsResult, label=label, namespace=namespace)


def warm(sessions: Sequence[str], *, label: str | None, namespace: str | None) -> Call[results.WarmResult]:
    named = (sessions,) if isinstance(sessions, str) else tuple(sessions)
    return _call("warm", results.WarmResult, sessions=named, label=label, namespace=namespace)


def clear(label: str, *, namespace: str | None, dry_run: bool) -> Call[results.ClearResult]:
    return _call("clear", results.ClearResult, label=label, namespace=namespace, dry_run=dry_run)


def subscribe(
    *, names: Sequence[str] | None, session: str | None, namespace: str | None
) -> Call[results.SubscribeResult]:
    listed = (names,) if isinstance(names, str) else None if names is None else tuple(names)
    return _call("subscribe", results.SubscribeResult, names=listed, session=session, namespace=namespace)


def shutdown(*, force: bool) -> Call[results.ShutdownResult]:
    return _call("shutdown", results.ShutdownResult, force=force)


def _named(sampling: Sampling | None) -> dict[str, Any] | None:
    """What a request says of the sampling: what its caller gave."""
    return None if sampling is None else sampling.model_dump(exclude_unset=True)


def _listed(method: str, labels: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(labels, str):
        raise InvalidRequest(f"{method}: labels: give a list of labels, not one text.", field="labels")
    return None if labels is None else tuple(labels)


def _call(method: str, result: type[R], **params: Any) -> Call[R]:
    """Check parameters on this side first: the same rules, and the error comes before anything is sent."""
    checked = METHODS[method].load_params(params)
    return Call(method, checked.model_dump(exclude_defaults=True), result)
