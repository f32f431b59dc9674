"""The pages of the Python reference: every public name of a room, from its docstring.

``<!-- names of headtrace.tracing: Tracer -->`` on a page becomes the documentation of what that room exports, beginning
with the names that are given; of a room that exports nothing by name, that of its modules. A public name without a
docstring is a warning.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import griffe
from public_names import exported, modules, room, undocumented

log = logging.getLogger("mkdocs.hooks.api")
_NAMES = re.compile(r"^<!-- names of (?P<room>[\w.]+)(?:: (?P<first>[\w, ]+))? -->$", re.MULTILINE)
_TABLE = re.compile(r"^<!-- table of (?P<room>[\w.]+) -->$", re.MULTILINE)


def names(module: griffe.Module, first: list[str]) -> str:
    """What mkdocstrings is asked for: one entry for each name, or for each module of a room without a list."""
    if module.exports:
        known = exported(module)
        if not set(first) <= set(known):
            log.warning("%s does not export %s", module.path, ", ".join(set(first) - set(known)))
        ordered = [*first, *(name for name in known if name not in first)]
        return "\n\n".join(f"::: {module.path}.{name}" for name in ordered)
    whole = "\n    options:\n      show_root_full_path: true\n"
    return "\n\n".join(f"::: {each.path}{whole}" for each in modules(module))


def table(module: griffe.Module) -> str:
    """The names of a package, each with the first sentence of its docstring and a link to all of it."""
    rows = ["| name | what it is |", "| --- | --- |"]
    for name in exported(module):
        member = module[name]
        if name.startswith("__") or member.is_module:
            continue
        target = member.final_target if isinstance(member, griffe.Alias) else member
        said = target.docstring.value.split("\n\n")[0] if target.docstring else ""
        first = re.split(r"(?<=\.)\s", " ".join(said.split()))[0].replace("|", "\\|")
        rows.append(f"| [`{name}`][{target.path}] | {first} |")
    return "\n".join(rows)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    def listed(found: re.Match[str]) -> str:
        return names(room(found["room"]), (found["first"] or "").replace(",", " ").split())

    markdown = _NAMES.sub(listed, markdown)
    return _TABLE.sub(lambda found: table(room(found["room"])), markdown)


def on_config(config: Any) -> Any:
    for name in undocumented():
        log.warning("%s is public and has no docstring", name)
    return config
