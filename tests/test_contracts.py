"""The rooms of DESIGN: imports go one way, data has no tensor algebra, and looking at a page needs no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_imports_go_one_way() -> None:
    """The contracts of pyproject.toml, as import-linter reads them."""
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint, "--config", ROOT / "pyproject.toml"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_packages_name_only_files_that_they_have() -> None:
    """What a package's docstring says lives there does: files are merged and renamed."""
    for init in (ROOT / "src" / "headtrace").rglob("__init__.py"):
        names = re.findall(r"`(\w+\.py)`", ast.get_docstring(ast.parse(init.read_text("utf-8"))) or "")
        missing = [name for name in names if not (init.parent / name).exists()]
        assert not missing, f"{init.relative_to(ROOT)} names {', '.join(missing)}"


@pytest.mark.parametrize(
    "code",
    [
        "import headtrace; headtrace.circuits.Circuit, headtrace.Firing, headtrace.Component, headtrace.Site",
        "import headtrace.circuits, headtrace.prompts, headtrace.lines, headtrace.vocabulary",
        "from headtrace.explorer import write_page",
        "from headtrace.tasks import load_task, TASKS",
        "from headtrace.models import ARCHITECTURES; len(ARCHITECTURES)",
        "from headtrace.tracing import METHODS, make_method; make_method('svt', channels='all')",
        "from headtrace.cli.models import list_models; import typer\n"
        "list_models(typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None))), json=True)",
    ],
)
def test_what_needs_no_model_loads_no_torch(code: str) -> None:
    wanted = f"import sys\n{code}\nassert not {{'torch', 'transformers'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", wanted], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_help_of_every_command_loads_no_torch() -> None:
    code = (
        "import contextlib, io, sys\n"
        "from headtrace.cli import main\n"
        "from headtrace.cli.main import COMMANDS\n"
        "for name in COMMANDS:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):\n"
        "        main([name, '--help'])\n"
        "    assert name in said.getvalue()\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
