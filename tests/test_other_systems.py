"""What only some systems have, and what happens without it. The suite runs on Linux: here the rest is taken away."""

from __future__ import annotations

import ast
import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headtrace import writing
from headtrace.cli.options import command_line
from headtrace.errors import InputError
from headtrace.runs import engines
from headtrace.runs import store as stores
from headtrace.runs.store import open_store

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MISSING = re.compile(
    r"f?chown|fork(pty)?|gete?[ug]id|[gs]etp?gid|set[su]id|killpg|mkfifo|nice|posix_\w+|p(read|write)v?|sched_\w+|"
    r"sync|statvfs|SIG(KILL|ALRM|HUP|USR[12]|CHLD)|RUSAGE_\w+"
)
"""Names of ``os``, ``signal`` and ``resource`` that Windows does not have."""
GUARDED: set[tuple[str, str]] = set()


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK], ids=["no locks here", "a network folder without locks"])
def no_flock(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    fcntl = pytest.importorskip("fcntl")

    def flock(*given: object) -> None:
        raise OSError(request.param, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(stores, "SETTLES", 0.0)


def test_where_nothing_can_be_locked_a_lease_keeps_a_second_run_out(tmp_path, no_flock) -> None:
    store = open_store(tmp_path)
    with stores.locked(store):
        assert (tmp_path / stores.LEASE).exists()
        with pytest.raises(InputError, match="Another run"), stores.locked(store):
            pass
    assert not (tmp_path / stores.LEASE).exists()


def test_open_files_by_number_are_known_on_every_system() -> None:
    assert writing._descriptor("/dev/stdout") == 1
    assert writing._descriptor("/dev/fd/7") == 7
    assert writing._descriptor("/dev/null") is None


def test_a_slash_ends_a_folder_where_backslashes_separate_them(monkeypatch) -> None:
    monkeypatch.setattr(os, "sep", "\\")
    monkeypatch.setattr(os, "altsep", "/")
    assert writing.ends_like_a_folder("circuits/")
    assert writing.ends_like_a_folder("circuits\\")
    assert not writing.ends_like_a_folder("circuits")


def test_workers_do_not_hear_interrupts_of_the_keyboard_on_any_system(monkeypatch) -> None:
    monkeypatch.delattr(subprocess, "CREATE_NEW_PROCESS_GROUP", raising=False)
    assert engines._own_process_group() == {"start_new_session": True}
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 512, raising=False)
    assert engines._own_process_group() == {"creationflags": 512}


def test_two_servers_never_share_a_port_on_windows(monkeypatch) -> None:
    serving = pytest.importorskip("headtrace.explorer.server.app")
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_KEEPALIVE, raising=False)
    with serving.bind("127.0.0.1", 0) as bound:
        assert bound.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert not bound.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)


def test_the_address_of_a_folder_means_the_folder(tmp_path) -> None:
    store = open_store((tmp_path / "a run").as_uri())
    assert store.folder == tmp_path / "a run"
    store.write("shards/1.json", b"{}")
    assert store.sizes() == {"shards/1.json": 2}


def test_the_command_to_go_on_is_written_for_the_shell_that_is_there(monkeypatch) -> None:
    words = ["run", "builtin", "--out", "my run's"]
    assert command_line(words) == """headtrace run builtin --out 'my run'"'"'s'"""
    with monkeypatch.context() as other:
        other.setattr(os, "name", "nt")
        told = command_line(words)
    assert told == """headtrace run builtin --out "my run's\""""


def test_what_a_pipe_has_no_character_for_is_printed_as_an_escape() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "headtrace", "show", "дом.json"], env=environment, capture_output=True
    )
    assert done.returncode == 2, done.stderr
    assert rb"\u0434\u043e\u043c.json" in done.stderr


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_nothing_is_used_that_windows_lacks(source: Path) -> None:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not imported & {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("os", "signal", "resource")
    }
    assert {name for name in used if MISSING.fullmatch(name)} <= {
        name for file, name in GUARDED if file == source.name
    }


def test_every_file_has_a_name_that_every_system_can_have() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a repository")
    names = [name for name in listed.stdout.split("\0") if name]
    assert [name for name in names if re.search(r'[<>:"|?*\\]|[. ](/|$)', name)] == []
    assert len({name.lower() for name in names}) == len(names)
