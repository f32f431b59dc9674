"""Clients that never finish a request do not keep others out: real sockets against a server with few file handles."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import pytest

import headtrace
from headtrace.explorer.panels import Settings
from headtrace.explorer.server.app import Server, bind, create_app
from tests.starting import Started

resource = pytest.importorskip("resource", reason="limits on open files are those of Unix")
HALF_OPEN, HANDLES = 170, 150


def serve() -> None:
    """In a process of its own, which may open only so many files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (HANDLES, HANDLES))
    bound = bind("127.0.0.1", 0)
    app = create_app([headtrace.load("builtin")], Settings(token="a-token-for-tests", head_seconds=2))
    print(bound.getsockname()[1], flush=True)
    asyncio.run(Server(app).serve(sockets=[bound]))


CLIENTS = f"""
import http.client, json, socket, sys, time
port = int(sys.argv[1])

def ask():
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", "/api/server", headers={{"Authorization": "Bearer a-token-for-tests"}})
        return connection.getresponse().status
    finally:
        connection.close()

def closed(one):
    one.settimeout(20)
    try:
        return one.recv(1) == b""
    except ConnectionError:
        return True

for attempt in range(200):
    try:
        before = ask()
        break
    except OSError:
        time.sleep(0.1)
slow = []
for number in range({HALF_OPEN}):
    if number % 8 == 0:
        time.sleep(0.02)  # a connection for which there is no room at once is tried again a second later
    one = socket.create_connection(("127.0.0.1", port), timeout=20)
    one.sendall(b"GET /api/server HTTP/1.1\\r\\nHost: 127")
    slow.append(one)
during = [ask() for _ in range(5)]
ended = sum(closed(one) for one in slow)
print(json.dumps({{"before": before, "during": during, "ended": ended, "after": ask()}}))
"""


def test_half_open_requests_do_not_stop_the_server() -> None:
    """Each half of a head is closed in the end, an honest request is answered all the while, the log stays empty."""
    server = Started(serve)
    try:
        port = server.stdout.readline().strip()
        done = subprocess.run(
            [sys.executable, "-c", CLIENTS, port], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        server.send_signal(signal.SIGTERM)
        log = server.told()
    finally:
        server.close()
    assert found["during"] == [found["before"]] * 5
    assert found["after"] == found["before"] < 400
    assert found["ended"] == HALF_OPEN
    assert len(log) < 2_000, log[:2_000]
