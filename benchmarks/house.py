"""How much a reader of headtrace has to follow: files and lines, and the way of a call. Prints JSON.

Ways: which modules and functions of headtrace are entered by ``headtrace trace``, by ``headtrace run``, and by one
click on an attention weight in the explorer (what the server does for it), counted with ``sys.setprofile``. Each is
done twice, and the second time is counted: what runs once per process, such as the import of modules, is left out.

python benchmarks/house.py [--repo OTHER/CHECKOUT]     # with PYTHONPATH=OTHER/CHECKOUT/src, to compare with it
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import http.client
import importlib
import inspect
import io
import json
import pkgutil
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

PROMPT = "When Mary and John went to the store, John gave a drink to"


def lines_by_package(source: Path) -> dict[str, dict[str, int]]:
    """Files and lines of Python in each package, and in all."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for path in source.rglob("*.py"):
        inside = path.relative_to(source)
        package = inside.parts[0] if len(inside.parts) > 1 else "modules of headtrace itself"
        lines = len(path.read_text(encoding="utf-8").splitlines())
        for name in (package, "all"):
            found[name].update(files=1, lines=lines)
    return {name: dict(counts) for name, counts in sorted(found.items(), key=lambda each: -each[1]["lines"])}


def longest_signatures(source: Path, most: int = 10) -> dict[str, int]:
    """The functions with the most parameters."""
    found: dict[str, int] = {}
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = node.args
                every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                place = f"{path.relative_to(source).with_suffix('').as_posix()}:{node.name}"
                found[place] = sum(each.arg not in ("self", "cls") for each in every)
    return dict(sorted(found.items(), key=lambda each: -each[1])[:most])


def names_with_two_meanings() -> dict[str, list[str]]:
    """Public classes that share their name with another class of headtrace."""
    import headtrace

    homes: dict[str, set[str]] = defaultdict(set)
    for module in pkgutil.walk_packages(headtrace.__path__, "headtrace."):
        if module.name.endswith("__main__"):
            continue
        try:
            content = vars(importlib.import_module(module.name))
        except Exception:  # a package that is not installed
            continue
        for name, value in content.items():
            if inspect.isclass(value) and value.__module__ == module.name and not name.startswith("_"):
                homes[name].add(module.name)
    return {name: sorted(modules) for name, modules in sorted(homes.items()) if len(modules) > 1}


class Way:
    """The modules and functions of headtrace that calls enter, in all threads begun since, and how deep they go."""

    def __init__(self, source: Path) -> None:
        self.inside, self.counted = f"{source}/", False
        self.entered: set[tuple[str, str]] = set()
        self.deepest = 0
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if not self.counted or event != "call" or not code.co_filename.startswith(self.inside):
            return
        if code.co_name.startswith("<"):  # comprehensions and lambdas
            return
        self.entered.add((code.co_filename, f"{code.co_name}:{code.co_firstlineno}"))
        depth = 0
        while frame is not None:
            depth += frame.f_code.co_filename.startswith(self.inside)
            frame = frame.f_back
        self.deepest = max(self.deepest, depth)

    def of(self, call: Callable[[], Any]) -> dict[str, int]:
        """Of a call that was done once before."""
        call()
        self.entered, self.deepest, self.counted = set(), 0, True
        try:
            call()
        finally:
            self.counted = False
        return {
            "modules": len({file for file, _ in self.entered}),
            "functions": len(self.entered),
            "depth": self.deepest,
        }


def command(*arguments: str) -> None:
    """A command of headtrace in this process; what it prints is dropped."""
    from headtrace.cli import main

    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        try:
            main(list(arguments))
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(silent.getvalue()) from None


@contextlib.contextmanager
def explorer() -> Generator[Callable[[], None]]:
    """A server of the explorer, and a click on an attention weight of a prompt that it has recorded."""
    import headtrace
    from headtrace.explorer.server import app

    # Earlier versions had the server itself in a module of its own.
    serving: Any = (
        app if hasattr(app, "Server") else importlib.import_module("headtrace.explorer.server.serving")
    )
    server, bound = serving.Server(app.create_app(headtrace.load("builtin"))), serving.bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)

    def post(path: str, content: Any) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", bound.getsockname()[1], timeout=60)
        connection.request("POST", path, json.dumps(content), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    prompt = {"text": PROMPT}
    recording = post("/api/record", prompt)[1]["id"]
    destinations = iter(range(5, 12))

    def click() -> None:
        # Another destination each time: an answer that is kept is not computed again.
        firing = {"layer": 1, "head": 2, "dest": next(destinations), "src": 1}
        status, answer = post("/api/why", {"recording": recording, "firing": firing})
        if status == 422:  # earlier versions took the prompt again
            status, answer = post("/api/why", {"prompt": prompt, "firing": firing})
        assert status == 200, answer

    try:
        yield click
    finally:
        server.should_exit = True
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repo", type=Path, default=Path(__file__).parents[1])
    source = (parser.parse_args().repo / "src" / "headtrace").resolve()
    way = Way(source)
    with tempfile.TemporaryDirectory() as folder, explorer() as click:
        out = iter(f"{folder}/{number}" for number in range(9))
        question = ["-p", PROMPT, "--answer", " Mary", "--wrong", " John"]
        ways = {
            "headtrace trace": way.of(
                lambda: command("trace", "builtin", *question, "--out", f"{next(out)}.json")
            ),
            "headtrace run": way.of(
                lambda: command("run", "builtin", "--task", "ioi", "-n", "30", "--out", next(out))
            ),
            "a click on a weight": way.of(click),
        }
    found = {
        "lines": lines_by_package(source),
        "ways": ways,
        "longest signatures": longest_signatures(source),
        "classes with two meanings": names_with_two_meanings(),
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
