"""How commands fail: one message, the right exit code, no traceback, and before anything is computed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import headtrace
from headtrace.cli import app
from headtrace.cli.failures import Commands

PROMPT = "When Mary and John went to the store, John gave a drink to"
HEADTRACE = [sys.executable, "-m", "headtrace"]


@pytest.fixture
def no_model(monkeypatch):
    """Whatever is found out after this would be found out too late."""

    def load(*_, **__):
        pytest.fail("a model was loaded before the mistake was found")

    monkeypatch.setattr("headtrace.models.load", load)


def run(*arguments: object, **how):
    return CliRunner().invoke(app, [str(a) for a in arguments], **how)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("record", "builtin", "-p", PROMPT, "--out", "file"), "cannot be a folder"),
        (("decompose", "builtin", "-p", PROMPT, "--out", "folder"), "it is a folder"),
        (("decompose", "builtin", "-p", PROMPT, "--out", "numbers.txt"), "end its name in .json"),
        (
            ("decompose", "builtin", "-p", PROMPT, "--firing", "L1H2:14:2", "--png", "a.xyz"),
            "end it in .png",
        ),
        (
            ("explain", "builtin", "-p", PROMPT, "--firing", "L1H2:14:2", "--out", "file/x.json"),
            "cannot be written",
        ),
        (("tasks", "accuracy", "builtin", "ioi", "--out", "folder"), "it is a folder"),
        (("toy", "isotropy", "--quick", "--out", "file"), "cannot be a folder"),
        (
            ("trace", "builtin", "-p", PROMPT, "--answer", " Mary", "--out", "file/c.json"),
            "cannot be written",
        ),
        (
            ("trace", "builtin", "-p", PROMPT, "--answer", " Mary", "--out", "c.txt"),
            "not a format of circuits",
        ),
        (("trace", "builtin", "--prompts", "prompts.jsonl", "--out", "c.json"), "holds one circuit"),
        (("trace", "builtin", "-p", PROMPT, "--answer", " Mary", "--out", "-", "--json"), "asked for twice"),
        (("emerge", "builtin", "builtin", "-p", PROMPT, "--png", "a.xyz"), "end it in .png"),
        (("emerge", "builtin", "builtin", "-p", PROMPT, "--bars", "file/a.png"), "cannot be written"),
        (("view", "c.json", "--out", "folder"), "it is a folder"),
        (("view", "c.json", "--out", "page.json"), "end its name in .html"),
        (("export", "c.json", "--out", "new.xyz"), "not a format of circuits"),
        (("export", "c.json", "--out", "new.json", "--to", "magic"), "There is no format 'magic'"),
        (("record", "builtin", "--prompt-file", "missing.txt"), "cannot be read"),
        (("record", "builtin", "--prompt-file", "empty.txt"), "is empty"),
        (("record", "builtin", "-p", "x", "--prompt-file", "empty.txt"), "Give one prompt"),
        (("record", "builtin", "--tokens", "1,2", "--chat"), "--chat needs the prompt as text"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_what_cannot_work_is_said_before_anything_is_computed(
    line, message, no_model, tmp_path, monkeypatch
) -> None:
    (tmp_path / "folder").mkdir()
    for name, text in (("file", "x"), ("empty.txt", ""), ("prompts.jsonl", '{"text": "x", "answer": "y"}')):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = run(*line)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_a_message(tmp_path) -> None:
    done = run("decompose", "builtin", "-p", PROMPT, "--out", "/dev/full")
    assert done.exit_code == 2
    assert "No space left on device" in done.stderr
    with open("/dev/full", "w", encoding="utf-8") as full:
        told = subprocess.run([*HEADTRACE, "tasks"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert told.returncode == 2
    assert "No space left on device" in told.stderr
    assert "Traceback" not in told.stderr


def test_a_closed_pipe_is_quiet() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run([*HEADTRACE, "tasks"], stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""


def test_an_interrupt_is_one_line(tmp_path) -> None:
    os.mkfifo(tmp_path / "prompt")
    started = subprocess.Popen(
        [*HEADTRACE, "record", "builtin", "--prompt-file", str(tmp_path / "prompt")],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with open(
        tmp_path / "prompt", "w", encoding="utf-8"
    ):  # opened on both sides: the command waits for its prompt
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=60)
    assert (started.returncode, out, err.strip()) == (130, "", "Interrupted.")


def _app(error: BaseException) -> typer.Typer:
    made = typer.Typer(cls=Commands)

    @made.command("first")
    def first() -> None:
        raise error

    @made.command("second")
    def second() -> None: ...

    return made


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "c.json"),
            2,
            "'c.json': Permission denied. Check the path",
        ),
        (headtrace.errors.InputError("bad \x1b[2J"), 2, "Error: bad \\x1b[2J"),
        (MemoryError(), 2, "not enough memory"),
        (KeyError("\x1b[31mx"), 70, "KeyError: '\\x1b[31mx' This is a bug in headtrace"),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
def test_every_failure_has_its_message_and_code(error, code, message, monkeypatch) -> None:
    monkeypatch.delenv("HEADTRACE_TRACEBACK", raising=False)
    done = CliRunner().invoke(_app(error), ["first"])
    assert done.exit_code == code
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_bug_says_how_to_see_the_traceback(monkeypatch) -> None:
    monkeypatch.delenv("HEADTRACE_TRACEBACK", raising=False)
    assert "HEADTRACE_TRACEBACK=1" in CliRunner().invoke(_app(KeyError("x")), ["first"]).stderr
    monkeypatch.setenv("HEADTRACE_TRACEBACK", "1")
    done = CliRunner().invoke(_app(KeyError("x")), ["first"])
    assert isinstance(done.exception, KeyError)
