"""ES modules into one inline script, without a bundler.

Each module becomes a function that is called once and hands out what it exports, so names stay private to
their module as they are on disk. Only the forms used here are understood: ``import { a, b } from "./x.js";``
and ``export`` before a function, class or const. Anything else is an error, not a surprise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from headtrace.errors import HeadtraceError

_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w.-]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) (\w+))", re.MULTILINE)
_LEFT_OVER = re.compile(r"^(?:import|export)\b.*$|\bimport\(", re.MULTILINE)


def inline_modules(modules: Mapping[str, str], entry: str, start: str) -> str:
    """One script that runs ``start`` of the module ``entry``; modules come after those they import."""
    blocks = [_block(name, modules[name]) for name in _order(modules, entry)]
    return "\n".join(["", *blocks, f"window.headtrace = {_variable(entry)}.{start}();", ""])


def _variable(name: str) -> str:
    return "$" + re.sub(r"\W", "_", name.removesuffix(".js"))


def _order(modules: Mapping[str, str], entry: str) -> list[str]:
    done: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise HeadtraceError(f"page modules import each other in a circle: {' -> '.join([*path, name])}")
        if name not in modules:
            raise HeadtraceError(f"page module {path[-1]} imports {name}, which does not exist")
        if name not in done:
            for _, needed in _IMPORT.findall(modules[name]):
                visit(needed, (*path, name))
            done.append(name)

    visit(entry, ())
    return done


def _block(name: str, text: str) -> str:
    exports = _EXPORT.findall(text)
    body = _IMPORT.sub(lambda found: f"const {{ {found[1]} }} = {_variable(found[2])};", text)
    body = _EXPORT.sub("", body)
    left = _LEFT_OVER.search(body)
    if left:
        raise HeadtraceError(f"page module {name}: cannot inline {left[0]!r}")
    if "</script" in body.lower() or "<!--" in body:
        raise HeadtraceError(f"page module {name} would end the script element it is put into")
    return f"const {_variable(name)} = (() => {{\n{body}\nreturn {{ {', '.join(exports)} }};\n}})();"
