"""Stand-alone HTML documents: one file that holds its style, script and data, and loads nothing.

Style and script are named by their hashes in a content security policy that allows nothing else. Data reaches the page
as escaped JSON. The modules of a script are inlined without a bundler: each becomes a function that is called once and
returns what it exports, so names stay private to their module as they are on disk. Only the forms used here are
understood: ``import { a, b } from "./x.js";`` and ``export`` before a function, class or const; anything else is an
error.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from headtrace.errors import HeadtraceError

_POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)


def document(template: str, *, title: str, style: str, script: str, data: Any) -> str:
    """A template, in which ``{{name}}`` is replaced, with its style, script and data."""
    values = {
        "policy": _POLICY.format(script=content_hash(script), style=content_hash(style)),
        "title": escape(f"{inert(title)[:200]} - headtrace"),
        "style": style,
        "script": script,
        "data": json_for_script(data),
    }
    # In one pass, so that no value is searched for names.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values.get(found[1], found[0]), template)


@cache
def part(name: str, folder: str = "page") -> str:
    """A file that pages are made of."""
    return (files("headtrace.explorer") / folder / name).read_text(encoding="utf-8")


@cache
def scripts(folder: str) -> dict[str, str]:
    """The JavaScript modules of a folder, by name."""
    names = (item.name for item in (files("headtrace.explorer") / folder).iterdir())
    return {name: part(name, folder) for name in sorted(names) if name.endswith(".js")}


def content_hash(text: str) -> str:
    """By which a content security policy names a script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_INVISIBLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202f\u2060-\u206f\ufeff\ud800-\udfff]"
)


def inert(text: str) -> str:
    r"""Text in which control characters, direction marks and unpaired surrogates are written out.

    >>> print(inert("a\u202eb"))
    a\u202eb
    """
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def json_for_script(data: Any) -> str:
    r"""JSON that cannot end the script element that contains it, nor break a line where JavaScript sees one.

    >>> print(json_for_script({"token": "</script>"}))
    {"token":"\u003c/script\u003e"}
    """
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# -- modules ---------------------------------------------------------------------------------------------------

_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w.-]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) (\w+))", re.MULTILINE)
_LEFT_OVER = re.compile(r"^(?:import|export)\b.*$|\bimport\(", re.MULTILINE)


def inline_modules(modules: Mapping[str, str], entry: str, start: str) -> str:
    """One script that calls ``start`` of the module ``entry``; each module comes after those it imports."""
    blocks: dict[str, str] = {}

    def add(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise HeadtraceError(f"page modules import each other in a circle: {' -> '.join([*path, name])}")
        if name not in modules:
            raise HeadtraceError(f"page module {path[-1]} imports {name}, which does not exist")
        if name not in blocks:
            for _, needed in _IMPORT.findall(modules[name]):
                add(needed, (*path, name))
            blocks[name] = _block(name, modules[name])

    add(entry, ())
    return "\n".join(["", *blocks.values(), f"window.headtrace = {_variable(entry)}.{start}();", ""])


def _variable(name: str) -> str:
    return "$" + re.sub(r"\W", "_", name.removesuffix(".js"))


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
