"""Plugin: every jaxtyping shape and every annotated type of headtrace is checked while tests run.

    python -m pytest -p tests.shapes tests/invariants tests/tracing

Checking makes a test about three times as slow, so one case of every numerical test is run so, and all of some: see
``tests/unshaped.py``.

jaxtyping's import hook decorates all functions with beartype. Names that a module imports for type checkers only are
imported here before the tests begin: a checker at run time needs them, too.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

from tests.unshaped import with_shapes

# Not these: pydantic checks the circuit's own dataclasses and the server's, and the command line is all strings.
SKIPPED = ("headtrace.circuits", "headtrace.cli", "headtrace.explorer", "headtrace.validation")


def checked(function):
    """A function whose arguments are checked. Where a float is asked for, an int will do."""
    return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)


def _install() -> None:
    loaded = sorted(name for name in sys.modules if name.startswith("headtrace"))
    assert not loaded, f"these were imported before the hook: {loaded}"
    root = Path(__file__).parent.parent / "src" / "headtrace"
    names = [f"headtrace.{child.stem}" for child in root.iterdir() if child.suffix == ".py" or child.is_dir()]
    names = [name for name in names if name not in SKIPPED and not name.endswith("__")]
    install_import_hook(names, "tests.shapes.checked")


_install()  # as early as a plugin can: test folders import headtrace from their conftest.py


def pytest_collection_modifyitems(config, items) -> None:
    checked_ones = set(with_shapes(items))
    config.hook.pytest_deselected(items=[item for item in items if item not in checked_ones])
    items[:] = [item for item in items if item in checked_ones]


def pytest_collection_finish(session) -> None:
    import headtrace

    for found in walk_packages(headtrace.__path__, "headtrace."):
        if not found.name.startswith(SKIPPED):
            module = import_module(found.name)
            for statement in _for_type_checkers(Path(module.__file__)):
                exec(compile(ast.Module([statement], []), module.__file__, "exec"), module.__dict__)


def _for_type_checkers(path: Path) -> list[ast.stmt]:
    """The imports of a module's ``if TYPE_CHECKING`` blocks."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [n for n in tree.body if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
    return [s for block in blocks for s in block.body if isinstance(s, (ast.Import, ast.ImportFrom))]
