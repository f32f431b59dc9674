"""What needs a package of an extra says which extra to install, before it begins; what is imported is declared."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headtrace
from headtrace.cli import app

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
V1 = str(ROOT / "tests/circuits/data/linear-1.json")
RAY = ("--engine", "ray", "--out", "out")
ASKED = ("interpret", V1, "--corpus", "sampled:100", "--out", "out")
NEEDING = [
    ("fastapi", "serve", ("serve", "builtin", "--no-open")),
    ("uvicorn", "serve", ("serve", "builtin", "--no-open")),
    ("ray", "ray", ("run", "builtin", "--task", "ioi", "-n", "4", *RAY)),
    ("ray", "ray", ("atlas", "builtin", "--corpus", "sampled:100", *RAY)),
    ("ray", "ray", ("interpret", V1, "--corpus", "sampled:100", *RAY)),
    ("openai", "interpret", (*ASKED, "--explainer", "openai", "--model-name", "any")),
    ("openai", "interpret", (*ASKED, "--judge", "openai", "--model-name", "any")),
    ("datasets", "interpret", ("atlas", "builtin", "--corpus", "hub:owner/name", "--out", "out")),
]


@pytest.mark.parametrize(("package", "extra", "line"), NEEDING, ids=lambda value: str(value)[:40])
def test_a_command_that_needs_a_missing_extra_says_which_one(
    package: str, extra: str, line: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    if package != "datasets":  # a corpus is cut by the model's tokenizer

        def load(*given: object, **how: object) -> None:
            pytest.fail("A model was loaded first.")

        monkeypatch.setattr(headtrace.models, "load", load)
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 2, done.output
    assert package in done.output
    assert f"pip install '.[{extra}]'" in " ".join(done.output.split())
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_python_says_so_too_before_a_run_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(headtrace.errors.InputError, match=r"pip install '\.\[ray\]'"):
        headtrace.run("builtin", ["When Mary"], out=tmp_path / "run", engine="ray")
    assert not list(tmp_path.iterdir())


def _declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", each)[0].lower().replace("-", "_") for each in requirements}


@cache
def _imported() -> list[tuple[str, str]]:
    """The module, and the top package of every import in it that is neither Python's nor ours."""
    found: list[tuple[str, str]] = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names | {"headtrace"}:
                    found.append((str(file.relative_to(ROOT / "src" / "headtrace")), top))
    return found


def test_what_is_imported_is_declared_and_an_extra_is_imported_only_where_it_is_asked_for() -> None:
    core = _declared(PROJECT["dependencies"]) | {"pydantic_core"}  # a part of pydantic
    assert "scikit_learn" in core
    core |= {"sklearn"}  # the name under which scikit-learn is imported
    extras = {
        name: _declared(PROJECT["optional-dependencies"][name])
        for name in ("serve", "ray", "interpret", "words")
    }
    rooms = {"explorer/server/": "serve", "cli/serve.py": "serve", "interpret/word_classes.py": "words"}
    rooms |= {"interpret/": "interpret"}
    undeclared: list[str] = []
    for module, package in _imported():
        own = next((extra for room, extra in rooms.items() if module.startswith(room)), None)
        if (module, package) == ("pytest_plugin.py", "pytest"):
            continue  # pytest itself loads it
        if package not in core | extras.get(own or "", set()):
            undeclared.append(f"{module}: {package}")
    assert undeclared == []


def test_every_package_of_an_extra_is_used() -> None:
    used = {package for _, package in _imported()} | {"ray"}  # ray is imported by name
    for extra in ("serve", "ray", "interpret", "words"):
        assert _declared(PROJECT["optional-dependencies"][extra]) <= used, extra
