"""The wheel in an environment of its own, outside the repository: ``python -m tests.package.installed dist``.

Installs it, runs the commands that a user tries first, and type-checks a small project against it. By default the
environment borrows the dependencies of the one that runs this, so that torch is not installed again; with ``--empty``
it is empty, and pip installs everything that the wheel asks for (``--extras serve,ray``). A folder that is given with
``--at`` is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONSUMER = Path(__file__).parent / "consumer"
PROMPT = "When Mary and John went to the store, John gave a drink to"
ASKED = ("-p", PROMPT, "--answer", " Mary", "--wrong", " John")
PLACES = ("store", "school", "park", "garden")
LONG = 120.0
"""Seconds that a server may take to start or to stop."""


class Installed:
    """An environment with the wheel in it, and an empty folder to work in."""

    def __init__(self, home: Path) -> None:
        self.home, self.work = home, home / "work"
        self.work.mkdir(parents=True)
        scripts = home / "env" / ("Scripts" if os.name == "nt" else "bin")
        self.python, self.headtrace = scripts / "python", scripts / "headtrace"
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "BROWSER", "DISPLAY")
        self.environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self.environment |= {"HF_HUB_OFFLINE": "1", "HEADTRACE_CACHE": str(home / "cache"), "COLUMNS": "120"}

    def install(self, wheel: Path, extras: str, borrow: bool, constraint: Path | None) -> None:
        venv.create(self.home / "env", with_pip=False, symlinks=os.name != "nt")
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        if borrow:
            subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
            paths = self._say("import sysconfig; print(sysconfig.get_path('purelib'))")
            # A path in a file like this comes after the environment's own: its headtrace is the wheel's.
            Path(paths.strip(), "borrowed.pth").write_text(
                sysconfig.get_path("purelib") + "\n", encoding="utf-8"
            )
        else:
            wanted = f"headtrace[{extras}] @ {wheel.resolve().as_uri()}" if extras else str(wheel)
            pinned = ["--constraint", str(constraint)] if constraint else []
            subprocess.run([*pip, *pinned, wanted], check=True)
        place = Path(self._say("import headtrace; print(headtrace.__file__)").strip())
        assert self.home.resolve() in place.resolve().parents, f"headtrace came from {place}"

    def _say(self, code: str) -> str:
        return subprocess.run(
            [self.python, "-c", code],
            cwd=self.work,
            env=self.environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """A command, which must end with this exit code."""
        done = subprocess.run(
            [self.headtrace, *arguments],
            cwd=self.work,
            env=self.environment,
            capture_output=True,
            text=True,
            encoding="utf-8",
        )
        last = [line for line in (done.stdout + done.stderr).splitlines() if any(map(str.isalnum, line))][-1:]
        print(
            f"{done.returncode}  headtrace {' '.join(arguments)[:90]}\n   {''.join(last)[:240]}", flush=True
        )
        if done.returncode != code:
            sys.exit(f"Expected exit code {code}.\n{done.stdout}\n{done.stderr}")
        return done


def first_commands(here: Installed) -> None:
    """What a user tries first, and what comes of it."""
    assert "Usage" in here.run(code=2).stdout + here.run("--help").stdout
    here.run("trce", code=2)
    assert json.loads(here.run("doctor", "--json").stdout)["ok"]
    here.run("trace", "builtin", *ASKED, "--paths", "complete", "--out", "c.json")
    assert json.loads((here.work / "c.json").read_text(encoding="utf-8"))["schema"].startswith(
        "headtrace.circuit/"
    )
    here.run("view", "c.json")  # there is no browser: it says where the page is
    page = (here.work / "c.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "<script" in page
    here.run("show", "c.json")
    here.run("verify", "c.json", "--edges", "top:2", "--controls", "1")
    lines = [
        {"text": PROMPT.replace("store", place), "answer": " Mary", "wrong": " John"} for place in PLACES
    ]
    (here.work / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    here.run("run", "builtin", "--prompts", "prompts.jsonl", "--out", "run")
    assert json.loads(here.run("runs", "run", "--json").stdout)["done"] == len(PLACES)
    here.run("merge", "run", "--out", "structure")
    assert (
        "12 layers" in here.run("merge", "run", "--reference", "gpt2-ioi", code=2).stderr
    )  # the reference is there
    atlas = ("--corpus", "sampled:200", "--channels", "top:1", "--out", "atlas")
    here.run("atlas", "builtin", *atlas)
    assert (here.work / "atlas" / "index.html").stat().st_size > 1000
    here.run("view", "nothing.json", code=2)


NEEDING = {
    "serve": [("serve", "builtin", "--no-open")],
    "ray": [
        ("run", "builtin", "--task", "ioi", "-n", "4", "--engine", "ray", "--out", "with-ray"),
        ("atlas", "builtin", "--corpus", "sampled:200", "--engine", "ray", "--out", "with-ray"),
    ],
    "interpret": [
        ("interpret", "c.json", "--corpus", "sampled:200", "--explainer", "openai", "--out", "words"),
        ("atlas", "builtin", "--corpus", "hub:owner/name", "--out", "of-the-hub"),
    ],
    "words": [],  # without it there are shorter lists, and a result says so
}
"""What does not work without each extra."""


def extras_install(wheel: Path) -> None:
    """Each extra by itself: pip finds versions of everything that it asks for, within the project's constraints."""
    for extra in NEEDING:
        wanted = f"headtrace[{extra}] @ {wheel.resolve().as_uri()}"
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--constraint"]
        done = subprocess.run([*pip, str(ROOT / "constraints.txt"), wanted], capture_output=True, text=True)
        print(f"{done.returncode}  pip install --dry-run 'headtrace[{extra}]'", flush=True)
        if done.returncode:
            sys.exit(f"The extra {extra} cannot be installed.\n{done.stderr}")


def missing_extras(here: Installed, there: str) -> None:
    """What needs an extra that is not there says which."""
    for extra, lines in NEEDING.items():
        for line in lines if extra not in there.split(",") else ():
            done = here.run(*line, code=2)
            assert f"pip install '.[{extra}]'" in " ".join(done.stderr.split()), done.stderr


def file_names(here: Installed) -> None:
    """Whatever was written has a name that every system can have."""
    odd = [path.name for path in here.work.rglob("*") if set(path.name) & set('<>:"|?*\\')]
    assert not odd, odd


def server(here: Installed) -> None:
    """The explorer starts, answers and stops."""
    group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if os.name == "nt" else {}
    started = subprocess.Popen(
        [here.headtrace, "serve", "builtin", "--port", "0", "--no-open"],
        cwd=here.work,
        env=here.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **group,
    )
    try:
        assert started.stdout is not None
        address = started.stdout.readline().strip()
        if not address.startswith("http://127.0.0.1:"):
            sys.exit(f"headtrace serve said {address!r}:\n{started.communicate(timeout=LONG)[1]}")
        with urllib.request.urlopen(address, timeout=LONG) as answer:
            page = answer.read()
        with urllib.request.urlopen(f"{address}static/app/main.js", timeout=LONG) as answer:
            script = answer.read()
        started.send_signal(signal.CTRL_BREAK_EVENT if os.name == "nt" else signal.SIGINT)
        code = started.wait(LONG)
    finally:
        started.kill()
        started.communicate()
    print(f"{code}  headtrace serve builtin\n   answered / with {len(page)} bytes, then stopped", flush=True)
    assert page.lower().startswith(b"<!doctype html>")
    assert script


def typed_project(here: Installed) -> None:
    """A project that uses headtrace, under pyright's strict mode without any exception, and then run."""
    pyright = Path(sys.executable).with_name("pyright")
    subprocess.run(
        [pyright, "--pythonpath", here.python, "-p", CONSUMER],
        cwd=here.work,
        env=here.environment,
        check=True,
    )
    (here.work / "project").mkdir()  # a folder of its own: the commands left a run in the other
    done = subprocess.run(
        [here.python, CONSUMER / "consumer.py", "project"],
        cwd=here.work,
        env=here.environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"The project does not run.\n{done.stderr}")
    print(f"0  consumer.py: {len(done.stdout.splitlines())} lines", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path)
    parser.add_argument(
        "--empty", action="store_true", help="Install every dependency into an empty environment."
    )
    parser.add_argument("--extras", default="", help="With --empty: extras of headtrace, with commas.")
    parser.add_argument(
        "--constraint", type=Path, help="With --empty: a file of exact versions (default: the newest)."
    )
    parser.add_argument(
        "--at", type=Path, help="A new folder that is kept; else one that is removed at the end."
    )
    given = parser.parse_args()
    (wheel,) = given.dist.glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:
        here = Installed((given.at or Path(folder, "installed")).resolve())
        here.install(wheel, given.extras, not given.empty, given.constraint)
        extras_install(wheel)
        first_commands(here)
        if given.empty:
            missing_extras(here, given.extras)
        if not given.empty or "serve" in given.extras.split(","):
            server(here)
        if not given.empty:
            typed_project(here)
        file_names(here)


if __name__ == "__main__":
    main()
