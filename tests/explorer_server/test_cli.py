"""``headtrace serve``: it starts, says where, stops when told, and says what is wrong before it loads a model."""

from __future__ import annotations

import json
import signal
import socket
import urllib.request
from typing import Any

import pytest
from typer.testing import CliRunner

from headtrace.cli import app
from headtrace.explorer.server import app as serving
from tests.explorer_server.live import LONG
from tests.starting import Started, command

PROMPT = {"text": "When Mary and John went to the store, John gave a drink to"}
TRACE = {"answer": " Mary", "wrong": " John", "paths": "complete"}


def test_it_serves_until_it_is_told_to_stop_also_while_it_traces(tmp_path) -> None:
    words = ["serve", "builtin", "--port", "0", "--no-open"]
    ends = {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM}
    processes = {sent: Started(command, *words) for sent in ends}
    try:
        for sent, process in processes.items():
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:")
            recorded = posted(f"{address}api/record", PROMPT)
            for _ in range(20):
                job = posted(f"{address}api/trace", {"recording": recorded["id"], **TRACE})
                assert job["state"] in ("queued", "running")
            process.send_signal(sent)
            told = process.told()
            assert process.wait(2 * LONG) == ends[sent], told
            assert "Traceback" not in told
            assert "Error" not in told
    finally:
        for process in processes.values():
            process.close()


def posted(address: str, content: Any) -> Any:
    request = urllib.request.Request(
        address, json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LONG) as answer:
        return json.load(answer)


@pytest.fixture
def no_model(monkeypatch):
    def load(*_, **__):
        pytest.fail("a model was loaded before the mistake was found")

    monkeypatch.setattr("headtrace.models.load", load)


def run(*arguments: str):
    return CliRunner().invoke(app, ["serve", "builtin", "--no-open", *arguments])


def test_a_port_in_use_is_said_before_anything_is_loaded(no_model) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("--port", str(taken.getsockname()[1]))
    assert done.exit_code == 2
    assert "is in use" in done.output
    assert "--port 0" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "no such host"), "no such name or address"),
        (("--host", "192.0.2.1"), "no address of this machine"),
        (("--token", "short"), "at least 16"),
        (("--run", "nowhere", "--port", "0"), "nowhere"),
        (("--atlas", "nowhere", "--port", "0"), "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_cannot_be_served_is_said_before_anything_is_loaded(arguments, words, no_model) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert words in done.output


def test_beyond_the_loopback_there_is_a_token_in_the_address_that_is_printed(monkeypatch) -> None:
    served: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        "headtrace.cli.serve._run", lambda server, bound, address, _: served.append((address, bool(server)))
    )
    for arguments in (("--host", "0.0.0.0"), ("--host", "127.0.0.1"), ("--token", "sixteen-letters-")):
        done = run("--port", "0", *arguments)
        assert done.exit_code == 0, done.output
    others, own, chosen = (address for address, _ in served)
    assert len(others.partition("?token=")[2]) >= 32
    assert "token" not in own
    assert chosen.endswith("?token=sixteen-letters-")


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_addresses_as_they_are_opened(host: str, loopback: bool) -> None:
    with serving.bind(host, 0) as bound:
        assert serving.is_loopback(bound) == loopback
        address, port = serving.url(bound), bound.getsockname()[1]
        assert address.endswith(f":{port}/")
        assert "0.0.0.0" not in address
