"""The code of a page of documentation: its fenced blocks, in order, and how to run them as a reader would.

Blocks of ``python``, and of commands (``sh``, ``bash``, ``console``), are run from the top of a page to its end, in one
namespace and one folder. A comment on the line above a block says where a block is not run as it stands:

    <!-- not run: a reason, in words -->
    <!-- run with: -n 4 -->            (appended to each command of the block, so that it takes seconds)
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from typer.testing import CliRunner

from headtrace.cli import app

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

COMMANDS = ("sh", "bash", "console")
RUN = ("python", *COMMANDS)
SHOWN = ("json", "jsonl", "toml", "text")
"""Languages of blocks that are there to be read."""

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\s*$")
_COMMAND = re.compile(r"\$? ?(headtrace|pip|curl|apt-get|dpkg-deb) ")
_MARKER = re.compile(r"^ *<!-- (?P<what>not run|run with): *(?P<text>.*?) *-->$")
_PRINTED = re.compile(r"^print\(.*\)\n((?:^#.*\n?)+)|^ *print\(.*\)  # \.\.\. (.*) \.\.\.$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its code, the line it begins at, and what the comment above it says."""

    page: Path
    line: int
    language: str
    code: str
    not_run: str | None = None
    run_with: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_session(self) -> bool:
        """Whether it shows a command behind ``$``, and below it what the command prints."""
        return self.language == "text" and self.code.startswith("$ headtrace ")

    @property
    def is_run(self) -> bool:
        """Whether tests run it."""
        return self.is_session or (self.language in RUN and self.not_run is None)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence and start is None:
            start = number
        elif fence and start is not None:
            found.append(_block(page, lines, start, number))
            start = None
    assert start is None, f"{page}:{start}: a block that does not end"
    return found


def _block(page: Path, lines: list[str], start: int, end: int) -> Block:
    opening = _FENCE.match(lines[start])
    assert opening
    indent = len(opening["indent"])
    code = "\n".join(line[indent:] for line in lines[start + 1 : end]) + "\n"
    marker = _MARKER.match(lines[start - 1]) if start else None
    said = {marker["what"]: marker["text"]} if marker else {}
    return Block(page, start + 2, opening["language"], code, said.get("not run"), said.get("run with", ""))


def indented(page: Path) -> list[str]:
    """Code that is indented instead of fenced, which nothing would run: its lines, with their numbers."""
    found: list[str] = []
    fenced = in_list = False
    before = ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced and line.strip():
            if not line.startswith(" "):
                in_list = bool(re.match(r"([-*]|\d+\.) ", line))
            elif line.startswith("    ") and not in_list and not before.strip():
                found.append(f"{page.relative_to(ROOT)}:{number}: {line.strip()}")
        before = line
    return found


def commands(code: str) -> Iterator[list[str]]:
    """The command lines of a block, each as its words; comments are left out, continued lines are joined."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words:
            yield words


def run_page(page: Path, names: dict[str, object] | None = None) -> dict[str, object]:
    """Run a page in the current folder; gives the names that its Python blocks leave behind.

    A block of ``text`` right after code is what that code prints, unless it begins with a command.
    """
    names = {"__name__": page.stem} if names is None else names
    before, printed = None, ""
    for block in blocks(page):
        if block.is_session:
            command, _, shown = block.code.partition("\n")
            _is_printed_by(block, shown, _run_commands(replace(block, code=command)))
        elif block.is_run:
            printed = _run_python(block, names) if block.language == "python" else _run_commands(block)
        elif block.language == "text" and _prints(before) and not _COMMAND.match(block.code):
            _is_printed_by(block, block.code, printed)
        before = block
    return names


def _is_printed_by(block: Block, shown: str, printed: str) -> None:
    missing = not_printed(shown, printed)
    assert missing == [], f"{block}: not printed:\n" + "\n".join(missing)


def _prints(block: Block | None) -> bool:
    """Whether a block is run as it stands."""
    return block is not None and block.language in RUN and block.not_run is None and not block.run_with


_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def not_printed(shown: str, printed: str) -> list[str]:
    """Lines of a shortened output that code did not print: the same words, and numbers that agree.

    ``...`` stands for anything. Numbers agree to 2 % or to one in their last digit; those of rounding's size (``1e-7``)
    within a factor of ten, since they differ from machine to machine.

    >>> not_printed("a 1.00 b\\n...\\nerror 2.1e-07, ...", "a  1.01 b\\nc\\nerror 4e-07, more")
    []
    >>> not_printed("a 1.00 b", "a 1.10 b")
    ['a 1.00 b']
    """
    whole = " ".join(printed.split())
    return [line for line in shown.splitlines() if line.strip(" .") and not _is_printed(line, whole)]


def _is_printed(line: str, whole: str) -> bool:
    words = " ".join(line.replace("...", "\0").split())
    pattern = _NUMBER.sub("\1", words)
    pattern = re.escape(pattern).replace("\1", f"({_NUMBER.pattern})").replace("\0", ".*?")
    given = _NUMBER.findall(words)
    return any(
        all(map(_agree, given, found.groups()))
        for found in re.finditer(f"(?={pattern.replace(chr(92) + ' ', ' ')})", whole)
    )


def _agree(shown: str, printed: str) -> bool:
    first, second = (float(each.replace(",", "")) for each in (shown, printed))
    if "e" in shown:
        return 0.1 <= abs(first / second) <= 10 if second else False
    last = 10.0 ** -len(shown.partition(".")[2]) if "." in shown else 0.0
    return abs(first - second) <= max(0.02 * abs(first), 1.01 * last)


def _run_python(block: Block, names: dict[str, object]) -> str:
    """Run a block; comments right below a line that prints, or ``# ... behind it ...``, say what is printed."""
    told = io.StringIO()
    placed = "\n" * (block.line - 1) + block.code  # so that a traceback shows the line of the page
    with contextlib.redirect_stdout(told):
        exec(compile(placed, str(block.page), "exec", dont_inherit=True), names)
    for below, behind in _PRINTED.findall(block.code):
        for line in (below or behind).splitlines():
            assert line.removeprefix("#").strip() in told.getvalue(), f"{block} does not print {line!r}"
    return told.getvalue()


def _run_commands(block: Block) -> str:
    """Run commands in this process."""
    printed = ""
    for words in commands(block.code):
        assert words[0] == "headtrace", f"{block}: what does not begin with headtrace cannot be run: say why"
        done = CliRunner().invoke(app, [*words[1:], *shlex.split(block.run_with)])
        if done.exit_code != 0:
            told = f"{block}: {shlex.join(words)} ended with {done.exit_code}\n{done.output}"
            raise AssertionError(told) from done.exception
        printed += done.output
    return printed
