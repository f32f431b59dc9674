"""Any command line ends with an exit code and a message: no traceback, no half a file, nothing written over.

Command lines are made at random from what each command declares: its arguments and options, with values that are right,
wrong, odd and hostile. Everything runs in this process on the built-in model.
"""

from __future__ import annotations

import json
import os
import random
import stat
from pathlib import Path

import polars as pl
import pytest
import typer
from typer.testing import CliRunner, Result

import headtrace
import headtrace.models
from headtrace.circuits import write_parquet
from headtrace.cli import app

CASES = int(os.environ.get("HEADTRACE_FUZZ_CASES", "9"))
"""Command lines per command; by hand, more: HEADTRACE_FUZZ_CASES=300 pytest tests/cli/test_fuzz_command_lines.py."""
PROMPT = "When Mary and John went to the store, John gave a drink to"
PATHS = str.split("""
    c.json many.parquet many.parquet#1 many.parquet#9 folder folder/ folder#0 empty prompts.jsonl prompt.txt broken.json
    binary.bin link.json loop.json c.json/inside.json missing.json missing/deep/new.json new.parquet new.html
    new.graphml new.dot new.txt new /dev/null /dev/stdout /proc/nothing.json figure.png figure.svg figure.xyz -
""")
ENDLESS = ["/dev/full", "/dev/zero"]
"""To be written to only: they can be read for ever."""
TEXTS = str.split("""
    builtin 1,2,3 L1H2:14:2 L9H9:1:1 L1H0,L2H0 ioi linear probability heads acc++ svt magic query key local global claim
    token float32 float16 cpu cuda:99 offset top:2 random:1 none graphml neuronpedia isotropy
""")
TEXTS += [PROMPT, " Mary", " John", "L1H2 14->2"]
HOSTILE = str.split("- -- [/b] %s{0} # é数🙂")
HOSTILE += ["", " ", "\x1b[31mred", "\u202egnp.x", "nul\0byte", "\ud800", "x" * 300]
NUMBERS = ["", *str.split("-1 0 1 2 3 0.5 x nan inf -0 1e999 0x10 ٣")]
NUMERIC = str.split("""
    tau top_k top_p max_firings min_influence ig_steps answer_id wrong_id depth leaves min_weight seed show factor
    batch_size
""")
LIKELY = {
    "model": ["builtin"],
    "checkpoints": ["builtin"],
    "prompt": [PROMPT],
    "answer": [" Mary"],
    "wrong": [" John"],
    "task": ["ioi", "prompts.jsonl"],
    "firing": ["L1H2:14:2"],
    "circuit": ["c.json", "many.parquet#1", "folder"],
    "circuits": ["c.json", "many.parquet", "folder"],
    "name": ["isotropy"],
    "dtype": ["float32"],
    "device": ["cpu"],
    "source": ["MLP 0 @14"],
    "target": ["L1H2 14->2"],
    "side": ["query"],
}
SLOW = {
    "controls": ["0", "1"],
    "rotations": ["1", "2"],
    "edges": ["top:1", "none", "x"],
    "number": ["1", "0"],
    "top": ["1"],
}


@pytest.fixture(scope="module")
def circuit():
    return headtrace.Tracer(headtrace.load("builtin")).trace(PROMPT, " Mary", " John")


@pytest.fixture
def place(circuit, tmp_path, monkeypatch) -> Path:
    """A folder of inputs, as the working directory; the model is loaded once for all."""
    circuit.save(tmp_path / "c.json")
    circuit.save(tmp_path / "folder" / "circuit-00000.json")
    write_parquet([circuit, circuit], tmp_path / "many.parquet")
    (tmp_path / "empty").mkdir()
    line = {"text": PROMPT, "answer": " Mary", "wrong": " John", "firing": "L1H2:14:2"}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    (tmp_path / "broken.json").write_text('{"schema": ')
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)))
    (tmp_path / "link.json").symlink_to("c.json")
    (tmp_path / "loop.json").symlink_to("loop.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda _: True)
    loaded = headtrace.load("builtin")
    real = headtrace.models.load

    def load(name, **how):
        plain = how.get("dtype", "float32") == "float32" and how.get("device") in (None, "auto", "cpu")
        return loaded if str(name) == "builtin" and plain and not how.get("revision") else real(name, **how)

    monkeypatch.setattr(headtrace.models, "load", load)
    return tmp_path


def _commands() -> dict[str, typer.core.TyperCommand]:
    top = typer.main.get_command(app)
    found = {}
    for name, command in top.commands.items():
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {each}": c for each, c in inner.items()}
    return found


def _value(parameter, chance: random.Random) -> str:
    if parameter.name in SLOW:
        return chance.choice(SLOW[parameter.name])
    if chance.random() < 0.75 and parameter.name in LIKELY:
        return chance.choice(LIKELY[parameter.name])
    if parameter.name in NUMERIC:
        return chance.choice(NUMBERS)
    if parameter.name in ("out", "png", "bars") and chance.random() < 0.2:
        return chance.choice(ENDLESS)
    named_like_a_file = any(
        word in parameter.name for word in ("out", "file", "prompts", "png", "bars", "firings", "circuit")
    )
    pools = (PATHS, PATHS, TEXTS, HOSTILE) if named_like_a_file else (TEXTS, TEXTS, PATHS, HOSTILE)
    return chance.choice(chance.choice(pools))


def _line(name: str, command, chance: random.Random) -> list[str]:
    """One command line: the arguments, the options that must be given, and some of the others."""
    words = name.split()
    for parameter in command.params:
        likely = {"prompt": 0.6, "answer": 0.5, "quick": 1.0}.get(parameter.name, 0.18)
        if parameter.name in ("help", "open_page") or (chance.random() > likely and not parameter.required):
            continue
        if parameter.param_type_name == "argument":
            words += [_value(parameter, chance) for _ in range(2 if parameter.nargs == -1 else 1)]
        elif parameter.is_flag:
            words.append(parameter.opts[0])
        else:
            words += [parameter.opts[0], _value(parameter, chance)]
    if chance.random() < 0.05:
        words.insert(
            chance.randrange(1, len(words) + 1), chance.choice(["--nothing", "--out", "\x1b[2J", "extra"])
        )
    return words


def _damaged(place: Path) -> list[str]:
    """Files that are not whole: temporary ones, empty ones, those whose format cannot be read."""
    found = [] if (place / "link.json").is_symlink() else ["a link was replaced"]
    for path in place.rglob("*"):
        if path.is_symlink() or path.is_dir() or path.name in ("broken.json", "binary.bin"):
            continue
        if path.name.startswith(".") or not path.stat().st_size:
            found.append(f"left behind: {path.name}")
        elif not _whole(path):
            found.append(f"damaged: {path.name}")
    return found


def _whole(path: Path) -> bool:
    try:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".parquet":
            pl.read_parquet(path, glob=False)
    except (ValueError, pl.exceptions.PolarsError):
        return False
    return path.suffix != ".html" or path.read_text(encoding="utf-8").rstrip().endswith("</html>")


@pytest.mark.parametrize(
    "name", sorted(_commands().keys() - {"serve"})
)  # which runs until it is told to stop
def test_any_command_line_ends_well(name: str, place: Path) -> None:
    command, chance = _commands()[name], random.Random(f"headtrace {name}")
    # The doctor has one option, and tests itself each time; the other two train or follow models.
    cases = {"toy": CASES // 4, "doctor": CASES // 4, "emerge": CASES // 2}.get(name, CASES)
    wrong: list[str] = []
    for _ in range(cases):
        line = _line(name, command, chance)
        given = chance.choice([PROMPT, "", "{}", (place / "folder" / "circuit-00000.json").read_text()])
        result = CliRunner().invoke(app, line, input=given)
        found = _complaints(line, result, place)
        wrong += [f"{line}: {', '.join(found)}\n{result.output}"] if found else []
    assert not wrong, "\n\n".join(wrong)


def _complaints(line: list[str], result: Result, place: Path) -> list[str]:
    """What is wrong with how a command line ended."""
    found = []
    if result.exit_code not in (0, 1, 2, 3):
        found.append(f"exit code {result.exit_code}")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        found.append(repr(result.exception))
    if "Traceback" in result.output:
        found.append("a traceback")
    if result.exit_code and not result.stderr.strip():
        found.append("no message")
    if any(control in result.output for control in ("\x1b[31mred", "\u202e")):
        found.append("control characters in the terminal")
    if "--json" in line and result.exit_code == 0 and not _is_object(result.stdout):
        found.append("no JSON object")
    if not stat.S_ISCHR(os.stat("/dev/null").st_mode):
        found.append("/dev/null was replaced")
    return found + _damaged(place)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
