"""Tables of the fields of a class, from the docstrings under them: what a file holds, as the code that reads it says.

``<!-- fields of headtrace.runs.manifest.Manifest -->`` on a page becomes such a table. A field without a docstring is a
warning.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import griffe
from public_names import room

log = logging.getLogger("mkdocs.hooks.fields")
_FIELDS = re.compile(r"^<!-- fields of (?P<path>[\w.]+)(?: without (?P<without>[\w, ]+))? -->$", re.MULTILINE)
_KINDS = {
    "int": "integer",
    "Index": "integer",
    "float": "number",
    "str": "text",
    "Text": "text",
    "bool": "true or false",
    "None": "null",
    "dict": "object",
    "Mapping": "object",
    "Any": "anything",
    "Number": "number",
    "Flag": "true or false",
    "Words": "list of text",
    "Form": "`merged`, `trace`",
    "EdgeKind": "`communication`, `attention`",
    "Kind": "text",
    "Side": "`query`, `key`, `value`, `input`, `root`",
}


def table(shape: griffe.Class, without: set[str]) -> str:
    """The fields of a class: name, type, meaning."""
    rows = ["| key | value | meaning |", "| --- | --- | --- |"]
    for name, member in shape.attributes.items():
        if name.startswith("_") or name in without or name == "model_config" or "property" in member.labels:
            continue
        if member.docstring is None:
            log.warning("%s.%s has no docstring", shape.path, name)
        meaning = " ".join(member.docstring.value.split()) if member.docstring else ""
        kind = kind_of(member.annotation).replace("|", "\\|")
        rows.append(f"| `{name.rstrip('_')}` | {kind} | {meaning} |")
    return "\n".join(rows)


def kind_of(annotation: Any) -> str:
    """A type in words."""
    return _in_words(str(annotation).replace("typing.", ""))


def _in_words(text: str) -> str:
    parts = _split(text, "|")
    if len(parts) > 1:
        return " or ".join(dict.fromkeys(map(_in_words, parts)))
    outer, _, inner = text.strip().partition("[")
    inside = [part for part in _split(inner.removesuffix("]"), ",") if part.strip() not in ("", "...")]
    if outer in ("list", "tuple", "Sequence"):
        kinds = list(dict.fromkeys(map(_in_words, inside)))
        return f"list of {' or '.join(_plural(kind) for kind in kinds)}"
    if outer in ("dict", "Mapping") and inside:
        return f"object of {_plural(_in_words(inside[1]))}"
    if outer == "Written":
        return _in_words(inside[0])
    if outer == "Literal":
        return ", ".join(f"`{part.strip().strip(chr(34)).strip(chr(39))}`" for part in inside)
    return _KINDS.get(outer, "object")


def _plural(kind: str) -> str:
    same = ("text", "true or false", "null", "anything")
    return kind if kind in same or " " in kind else f"{kind}s"


def _split(text: str, mark: str) -> list[str]:
    """Parts of a text between marks that are not inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    def made(found: re.Match[str]) -> str:
        module, _, name = found["path"].rpartition(".")
        shape = room(module)[name]
        assert isinstance(shape, griffe.Class), found["path"]
        return table(shape, set((found["without"] or "").replace(",", " ").split()))

    return _FIELDS.sub(made, markdown)
