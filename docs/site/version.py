"""The version that every page shows, from the one place where the package states it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "src" / "headtrace" / "__init__.py"


def version() -> str:
    """What ``headtrace.__version__`` says, read without importing anything."""
    for statement in ast.parse(PACKAGE.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant(value=str(said))):
                return said
            case _:
                pass
    raise LookupError(f"{PACKAGE} states no __version__")


def on_config(config: Any) -> Any:
    config.copyright = f"headtrace {version()} · {config.copyright}"
    return config
