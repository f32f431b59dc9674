"""What README and docs tell the reader to run does run: every block of code, and every command that is named."""

from __future__ import annotations

import re
import shlex
import webbrowser
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import headtrace
from headtrace.cli import app
from headtrace.models.architectures import ARCHITECTURES
from headtrace.tasks import TASKS
from headtrace.tracing import METHODS
from tests.documented import COMMANDS, PAGES, ROOT, RUN, SHOWN, Block, blocks, commands, indented, run_page

BLOCKS = [block for page in PAGES for block in blocks(page)]
FEW = 15  # eleven need a hub, a server, a service, a bucket, a large download or processes of their own
"""So many blocks may be left out of the test, each with its reason."""


def _case(page: Path) -> object:
    """A page as a test of its own; pages that use SmolLM2 are marked."""
    run = [block for block in blocks(page) if block.is_run]
    marks = [pytest.mark.smollm2] if any("smollm2" in block.code for block in run) else []
    return pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks) if run else None


@pytest.fixture(autouse=True)
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page registers is forgotten after it; no page opens a browser."""
    for registry in (METHODS, ARCHITECTURES, TASKS):
        monkeypatch.setattr(registry, "_known", dict(registry))
    monkeypatch.setattr(webbrowser, "open", lambda address: True)


load = headtrace.models.load


@cache
def model_of(name: str) -> headtrace.Model:
    return load(name)


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What several pages load by its name alone is loaded for the first of them: no page changes a model."""

    def loaded(name: Any, *given: Any, **options: Any) -> headtrace.Model:
        asked = {key: value for key, value in options.items() if value is not None}
        plain = not given and asked.items() <= {"dtype": "float32", "device": "auto"}.items()
        return (
            model_of(name) if plain and name in ("builtin", "smollm2-135m") else load(name, *given, **options)
        )

    monkeypatch.setattr(headtrace.models, "load", loaded)
    monkeypatch.setattr(headtrace, "load", loaded, raising=False)


@pytest.mark.parametrize("page", [case for page in PAGES if (case := _case(page)) is not None])
def test_a_page_runs_from_top_to_bottom(
    page: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("smollm2"):
        request.getfixturevalue("smollm2_is_there")
    monkeypatch.chdir(tmp_path)
    run_page(page)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_run_or_says_why_not(block: Block) -> None:
    assert block.language in (*RUN, *SHOWN), f"a block of {block.language or 'nothing'}: run, or to be read?"
    if block.not_run is not None:
        assert len(block.not_run.split()) >= 4, "a reason, in words"
        assert block.language in RUN, "nobody would run it anyway"
    if block.run_with:
        assert block.language in COMMANDS
        assert block.not_run is None


def of_make(block: Block) -> bool:
    return block.language in COMMANDS and all(words[0] == "make" for words in commands(block.code))


def test_few_blocks_are_left_out() -> None:
    left_out = [str(block) for block in BLOCKS if block.not_run is not None and not of_make(block)]
    assert len(left_out) <= FEW, left_out
    assert len(BLOCKS) > 4 * len(left_out)


def test_what_a_page_makes_is_a_target_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    made = {words[1] for block in BLOCKS if of_make(block) for words in commands(block.code)}
    assert {"demo", "test"} <= made <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_fenced_so_that_it_can_be_run(page: Path) -> None:
    assert indented(page) == []


def _named() -> Iterator[tuple[str, list[str]]]:
    """Every command that a page or the Makefile names, also inside a sentence, with where it stands."""
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for code in re.findall(r"`(headtrace [a-z][^`\n]*)`", page.read_text(encoding="utf-8")):
            yield f"{page.relative_to(ROOT)}: {code}", shlex.split(code)
    for block in BLOCKS:
        if block.language in COMMANDS:
            for words in commands(block.code):
                if words[0] == "headtrace":
                    yield f"{block}: {shlex.join(words)}", words
    for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines():
        if "/headtrace " in line and "@echo" not in line:
            yield f"Makefile: {line.strip()}", ["headtrace", *shlex.split(line)[1:]]


@pytest.mark.parametrize("words", [pytest.param(words, id=where) for where, words in _named()])
def test_a_command_that_is_named_exists_with_these_options(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if command.invoke_without_command and rest[0] not in command.commands:
            break
        if re.fullmatch(r"\.\.\.|[A-Z]+", rest[0]):
            return
        assert rest[0] in command.commands, f"no command {rest[0]!r}"
        command = command.commands[rest.pop(0)]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.split("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
    assert given <= known | {"--help"}, f"no option {', '.join(sorted(given - known))}"


@pytest.mark.parametrize(
    "firing", re.findall(r"--firing (L\d+H\d+:\d+:\d+)", (ROOT / "README.md").read_text())
)
def test_a_firing_that_the_readme_names_is_one_of_the_models_it_names(firing: str) -> None:
    from headtrace.vocabulary import Firing

    found = Firing.parse(firing)
    assert found.layer < 3, "the built-in model has three layers"
    assert found.head < 4
    assert found.src <= found.dest < 15
