"""Clients that never finish a request do not keep others out: real sockets against a server with few file handles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

resource = pytest.importorskip("resource", reason="limits on open files are those of Unix")
ROOT = Path(__file__).parent.parent.parent
HALF_OPEN, HANDLES = 170, 150

SERVER = f"""
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({HANDLES}, {HANDLES}))
import headtrace
from headtrace.explorer.panels import Settings
from headtrace.explorer.server.app import Server, bind, create_app
bound = bind("127.0.0.1", 0)
app = create_app([headtrace.load("builtin")], Settings(token="a-token-for-tests", head_seconds=2))
print(bound.getsockname()[1], flush=True)
asyncio.run(Server(app).serve(sockets=[bound]))
"""

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


def test_half_open_requests_do_not_stop_the_server(tmp_path) -> None:
    """Each half of a head is closed in the end, an honest request is answered all the while, the log stays empty."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    log = tmp_path / "log"
    with log.open("w") as errors:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=environment,
        )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        done = subprocess.run(
            [sys.executable, "-c", CLIENTS, port], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
    finally:
        server.terminate()
        server.wait(timeout=30)
    assert found["during"] == [found["before"]] * 5
    assert found["after"] == found["before"] < 400
    assert found["ended"] == HALF_OPEN
    assert log.stat().st_size < 2_000, log.read_text()[:2_000]
