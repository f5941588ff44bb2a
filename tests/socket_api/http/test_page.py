"""The inspector's files and its sign-in, without a browser: who gets what, under which rules, and of which size."""

from __future__ import annotations

import gzip
import hashlib
import re

import pytest
from torpor.socket_api.http.page import FOLDER, HEADERS, LINK_PATH, TOKEN_PATH, files
from torpor.socket_api.http.sign_in import CODE_LASTS_S, MAX_CODES, Codes
from torpor.tests.socket_api.http.http_rig import Answer, Begin, HttpThread, asked

LONG = "a-token-of-some-length"
OTHER = "another-token-0123456789abcdef"
HTML = "text/html,application/xhtml+xml"
VENDORED = {"preact.js": "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7"}
"""htm/preact/standalone.module.js of the npm package htm 3.1.1."""

MAX_BYTES = 35 * 1024
"""Of all files together, compressed."""

MAX_LINES = 600


def ask(server: HttpThread, method: str, path: str, body: object = None, **headers: str) -> Answer:
    """Ask on the port."""
    connection = server.on_port()
    try:
        return asked(connection, method, path, body, **headers)
    finally:
        connection.close()


def test_a_browser_gets_the_page_without_a_token_and_programs_are_answered_as_before(server: HttpThread) -> None:
    page = ask(server, "GET", "/", accept=HTML)
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.body == (FOLDER / "index.html").read_bytes()
    assert ask(server, "GET", "/").status == 401
    assert "openapi" in ask(server, "GET", "/", x_api_key=server.token).json
    assert "openapi" in server.ask("GET", "/", accept=HTML).json, "no browser is on the Unix socket"
    named = re.findall(rb'"(/inspector/[^"]+)"', page.body)
    assert len(named) > 3
    for each in named:
        assert ask(server, "GET", each.decode()).status == 200, each
    for each in ("/inspector/LICENSE-htm.txt", "/inspector/..%2Fpage.py", "/inspector/", "/inspector/nothing.js"):
        assert ask(server, "GET", each).status in (401, 404), each


def test_every_file_comes_with_a_policy_that_runs_nothing_from_elsewhere(server: HttpThread) -> None:
    for name in files():
        answer = ask(server, "GET", f"/inspector/{name}")
        assert HEADERS.items() <= answer.headers.items(), name
        again = ask(server, "GET", f"/inspector/{name}", if_none_match=answer.headers["etag"])
        assert (again.status, again.body) == (304, b"")
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "*" not in policy
    assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= set(policy.split("; "))


def test_no_file_names_another_host_or_makes_text_to_a_script() -> None:
    for name, file in files().items():
        text = file.content.decode()
        hosts = set(re.findall(r"https?://[\w.-]+", text)) - {"http://www.w3.org"}
        assert not hosts, name
        assert "@import" not in text, name
        if name in VENDORED:
            continue
        for way in ("innerHTML", "dangerouslySetInnerHTML", "eval(", "document.write", "localStorage", "outerHTML"):
            assert way not in text, name
        assert "<script>" not in text, name


def test_vendored_files_are_what_was_published_and_have_their_licenses() -> None:
    for name, digest in VENDORED.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest
    assert "Apache License" in (FOLDER / "LICENSE-htm.txt").read_text()
    assert "MIT License" in (FOLDER / "LICENSE-preact.txt").read_text()
    assert {path.name for path in FOLDER.iterdir()} == {*files(), "LICENSE-htm.txt", "LICENSE-preact.txt"}


def test_the_page_is_small_and_so_is_each_file() -> None:
    assert len(gzip.compress(b"".join(file.content for file in files().values()), 9)) <= MAX_BYTES
    for name, file in files().items():
        assert file.content.count(b"\n") <= MAX_LINES, name


# --- signing in


def test_a_code_is_given_with_a_token_and_exchanged_for_it_once(begin: Begin) -> None:
    server = begin()
    server.tokens_path.write_text(f"team {LONG}\n")
    assert ask(server, "POST", LINK_PATH, {}).status == 401
    made = ask(server, "POST", LINK_PATH, {}, x_api_key=LONG).json
    assert made["seconds"] == CODE_LASTS_S
    assert LONG not in made["code"]
    origin = f"http://127.0.0.1:{server.port}"
    told = ask(server, "POST", TOKEN_PATH, {"code": made["code"]}, origin=origin)
    assert (told.status, told.json) == (200, {"token": LONG, "namespace": "team"})
    assert told.headers["cache-control"] == "no-store"
    for code in (made["code"], "unknown", "", 7, None):
        refused = ask(server, "POST", TOKEN_PATH, {"code": code}, origin=origin)
        assert refused.status == 401
        assert "torpor inspect" in refused.json["error"]["message"]
    assert server.ask("POST", LINK_PATH, {}).status == 404, "the Unix socket has no token to give"


def test_a_code_is_too_old_after_two_minutes_and_the_oldest_of_its_token_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("torpor.socket_api.http.sign_in.time.monotonic", lambda: now)
    codes = Codes()
    old = codes.make(b"token")
    now += CODE_LASTS_S
    assert codes.take(old) is None
    other = codes.make(b"other")
    given = [codes.make(b"token") for _ in range(MAX_CODES + 1)]
    assert codes.take(given[0]) is None
    assert codes.take(other) == b"other"
    assert [codes.take(code) for code in given[1:]] == [b"token"] * MAX_CODES


def test_a_token_that_is_gone_meanwhile_is_not_given(begin: Begin) -> None:
    server = begin()
    code = ask(server, "POST", LINK_PATH, {}, x_api_key=server.token).json["code"]
    server.tokens_path.write_text(f"team {LONG}\n")
    assert ask(server, "POST", TOKEN_PATH, {"code": code}).status == 401


def test_a_code_gives_the_very_token_that_asked_and_no_other_of_its_namespace(begin: Begin) -> None:
    """Else who has a token for a while would get one that lasts, and a token that is gone would give another."""
    server = begin()
    server.tokens_path.write_text(f"default {LONG}\ndefault {OTHER}\n")
    code = ask(server, "POST", LINK_PATH, {}, authorization=f"Bearer {OTHER}").json["code"]
    assert ask(server, "POST", TOKEN_PATH, {"code": code}).json["token"] == OTHER
    code = ask(server, "POST", LINK_PATH, {}, x_api_key=OTHER).json["code"]
    server.tokens_path.write_text(f"default {LONG}\n")
    assert ask(server, "POST", TOKEN_PATH, {"code": code}).status == 401


# --- whose page may ask


def test_the_page_asks_from_its_own_origin_and_no_other_page_does(server: HttpThread) -> None:
    own = f"http://127.0.0.1:{server.port}"
    for origin, status in (
        (own, 200),
        (f"http://localhost:{server.port}", 403),
        (f"https://127.0.0.1:{server.port}", 403),
        ("http://127.0.0.1", 403),
        ("http://127.0.0.1:1", 403),
        ("null", 403),
        ("http://evil.example", 403),
    ):
        assert ask(server, "GET", "/v1/sessions", origin=origin, x_api_key=server.token).status == status, origin
    host = f"evil.example:{server.port}"
    assert ask(server, "GET", "/", accept=HTML, host=host).status == 403
    assert ask(server, "GET", "/v1/sessions", host=host, origin=f"http://{host}", x_api_key=server.token).status == 403
    assert server.ask("GET", "/v1/sessions", origin="http://localhost").status == 403


def test_without_the_inspector_there_is_no_page_and_no_origin(begin: Begin) -> None:
    server = begin(inspector=False)
    for path in ("/", "/inspector/main.js"):
        assert ask(server, "GET", path, accept=HTML).status == 401
        assert ask(server, "GET", "/inspector/main.js", x_api_key=server.token).status == 404
    assert ask(server, "POST", LINK_PATH, {}, x_api_key=server.token).status == 404
    own = f"http://127.0.0.1:{server.port}"
    assert ask(server, "GET", "/v1/sessions", origin=own, x_api_key=server.token).status == 403


@pytest.mark.parametrize("path", ["/v1/status", "/v1/usage", "/metrics"])
def test_figures_of_all_namespaces_are_for_the_owner(begin: Begin, path: str) -> None:
    server = begin()
    token = server.token
    with server.tokens_path.open("a") as file:
        file.write(f"team {LONG}\n")
    assert ask(server, "GET", path, x_api_key=token).status == 200
    assert ask(server, "GET", path, x_api_key=LONG).status == 403
