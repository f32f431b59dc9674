"""Who may ask: only pages of this server, on a name of this machine, with bodies of a size, and with the token."""

from __future__ import annotations

import json
import socket

import pytest

from headtrace.explorer.panels import Settings
from headtrace.explorer.server.http import HEADERS, host_allowed
from headtrace.explorer.server.routes import static_files
from tests.explorer_server.live import Live, live

TOKEN = "a-token-that-nobody-guesses"
PROMPT = {"text": "When Mary and John went"}
ERROR = {"code", "message"}


def refused(answer, status: int, code: str) -> None:
    assert answer.status == status, answer.body
    assert set(answer.json()) == ERROR
    assert answer.json()["code"] == code
    assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "10.0.0.7:80", "", "localhost@evil"]
)
def test_a_name_that_was_made_to_point_here_is_refused(server: Live, host: str) -> None:
    refused(server.get("/api/openapi.json", Host=host), 403, "host")
    refused(server.post("/api/record", PROMPT, Host=host), 403, "host")
    refused(server.get("/", Host=host), 403, "host")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1:8642", "[::1]:8642", "127.0.0.2"])
def test_names_of_the_loopback_are_served_on_any_port_so_that_it_can_be_forwarded(
    server: Live, host: str
) -> None:
    assert server.get("/api/openapi.json", Host=host).status == 200


def test_two_host_headers_are_refused(server: Live) -> None:
    said = server.raw(
        b"GET /api/server HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    )
    assert b" 400 " in said.split(b"\r\n")[0] or b" 403 " in said.split(b"\r\n")[0]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
    ids=str,
)
def test_a_page_of_another_site_gets_nothing_but_the_start_page(
    server: Live, headers: dict[str, str]
) -> None:
    refused(server.post("/api/record", PROMPT, **headers), 403, "origin")
    refused(server.ask("DELETE", "/api/jobs/x", **headers), 403, "origin")
    refused(server.get("/api/openapi.json", **headers), 403, "origin")
    assert server.get("/", **headers).status != 403


def test_the_own_page_may_ask(server: Live) -> None:
    own = {"Origin": f"http://localhost:{server.port}", "Host": f"localhost:{server.port}"}
    assert server.post("/api/record", PROMPT, **own, Sec_Fetch_Site="same-origin").status == 200


def test_every_answer_has_the_headers_that_protect_it(server: Live) -> None:
    for answer in (server.get("/"), server.get("/api/openapi.json"), server.get("/nothing")):
        assert {name: answer.headers[name.lower()] for name in HEADERS} == HEADERS
        assert "access-control-allow-origin" not in answer.headers
        assert "server" not in answer.headers
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server/app.py",
        "/static/app/../../server/app.py",
        "/static/page/..%2f..%2fserver%2fapp.py",
        "/static/page/%2e%2e/page.py",
        "/static//etc/passwd",
        "/static/%2fetc/passwd",
        "/static/page/template.html",
        "/static/page/graph.js%00",
        "/static/page\\graph.js",
        "/static/page",
        "/static/",
        "/..%2f..%2fetc/passwd",
    ],
)
def test_no_file_but_the_listed_ones_can_be_read(server: Live, path: str) -> None:
    refused(server.get(path), 404, "not_found")


def test_the_drawing_modules_are_those_of_the_page(server: Live) -> None:
    names = [name for name in static_files() if name.startswith("page/")]
    assert "page/graph.js" in names
    for name in names:
        answer = server.get(f"/static/{name}")
        assert answer.status == 200
        assert answer.body == static_files()[name][0].read_bytes()
        assert answer.headers["content-type"].partition(";")[0] in (
            "text/javascript",
            "text/css",
            "text/html",
        )


def test_bodies_have_a_limit_however_they_are_sent(builtin) -> None:
    with live(builtin, Settings(body_bytes=1000)) as server:
        large = json.dumps({"text": "x" * 2000}).encode()
        refused(server.post("/api/record", body=large), 413, "body")
        refused(server.post("/api/record", body=iter([large[:900], large[900:]])), 413, "body")
        small = json.dumps(PROMPT).encode()
        assert server.post("/api/record", body=iter([small[:9], small[9:]])).status == 200
        headers = b"POST /api/record HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        assert b" 413 " in server.raw(headers + b"Content-Length: 99999999999999\r\n\r\n").split(b"\r\n")[0]


def test_a_body_that_does_not_come_is_not_waited_for(builtin) -> None:
    with live(builtin, Settings(body_seconds=1)) as server:
        headers = b"POST /api/record HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        assert b" 408 " in server.raw(headers + b"Content-Length: 10\r\n\r\n{").split(b"\r\n")[0]


def test_bodies_that_a_form_of_another_site_could_send_are_refused(server: Live) -> None:
    body = json.dumps(PROMPT).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        refused(server.post("/api/record", body=body, Content_Type=kind), 415, "body")


def test_get_changes_nothing(server: Live) -> None:
    for route in server.app.openapi()["paths"].values():
        assert not {"get", "post"} <= set(route)
    for path in ("/api/record", "/api/why", "/api/intervene", "/api/trace"):
        answer = server.get(path)
        refused(answer, 405, "method")
        assert answer.headers["allow"] == "POST"


def test_nothing_is_answered_without_the_token(builtin) -> None:
    with live(builtin, Settings(token=TOKEN, loopback=False, hosts=("lab.example",))) as server:
        for path in ("/", "/api/server", "/api/openapi.json", "/static/page/graph.js", "/nothing"):
            refused(server.get(path), 401, "token")
            refused(server.get(path, Authorization="Bearer wrong"), 401, "token")
        refused(server.get("/?token=wrong"), 401, "token")
        refused(server.get(f"/api/openapi.json?token={TOKEN}"), 401, "token")
        refused(server.get("/", Cookie='headtrace-session-1="; nonsense'), 401, "token")
        assert server.get("/api/openapi.json", Authorization=f"Bearer {TOKEN}").status == 200
        assert (
            server.get("/api/openapi.json", Authorization=f"Bearer {TOKEN}", Host="lab.example").status == 200
        )
        refused(
            server.get("/api/openapi.json", Authorization=f"Bearer {TOKEN}", Host="evil.example"), 403, "host"
        )


def test_the_token_is_exchanged_for_a_cookie_that_does_not_tell_it(builtin) -> None:
    with live(builtin, Settings(token=TOKEN)) as server:
        answer = server.get(f"/?token={TOKEN}")
        assert answer.status == 200
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert TOKEN not in cookie + answer.body.decode()
        kept = cookie.partition(";")[0]
        assert server.get("/api/openapi.json", Cookie=kept).status == 200
        assert TOKEN not in "".join(server.logged)


def test_any_address_of_the_machine_is_served_where_there_is_a_token_but_no_foreign_name() -> None:
    def allowed(*hosts: str) -> bool:
        return host_allowed([*hosts], ["Lab.example"], any_address=True)

    assert all(map(allowed, ("10.0.0.7:8642", "lab.example", "[2001:db8::1]:80", "localhost")))
    assert not any((allowed("evil.example"), allowed(), allowed("localhost", "localhost")))


def test_so_many_requests_are_answered_at_the_same_time(builtin) -> None:
    with live(builtin, Settings(max_requests=1)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(
                b"POST /api/record HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 10\r\n\r\n{"
            )
            statuses = [server.get("/api/openapi.json").status for _ in range(50)]
        assert 429 in statuses
