"""What is public, and what is said about it: read from the source, nothing is imported.

A room is a package whose ``__all__`` lists its names (or, without a list, whose modules have public ones). Public are
those names, and the public methods and properties of the classes among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe

SOURCE = Path(__file__).parents[2] / "src"
ROOMS = (
    "models",
    "prompts",
    "channels",
    "tracing",
    "circuits",
    "causal",
    "runs",
    "families",
    "sinks",
    "interpret",
    "tasks",
    "explorer",
    "figures",
    "toy",
    "errors",
    "vocabulary",
)


@cache
def package() -> griffe.Module:
    """The package as its source states it."""
    loader = griffe.GriffeLoader(search_paths=[SOURCE])
    found = loader.load("headtrace")
    loader.resolve_aliases(implicit=False, external=False)
    assert isinstance(found, griffe.Module)
    return found


def room(name: str) -> griffe.Module:
    """A room by its dotted name."""
    found = package() if name == "headtrace" else package()[name.removeprefix("headtrace.")]
    assert isinstance(found, griffe.Module)
    return found


def exported(module: griffe.Module) -> list[str]:
    """The names in a module's ``__all__``."""
    return [str(name) for name in module.exports or ()]


def modules(module: griffe.Module) -> list[griffe.Module]:
    """The public modules of a room, itself first where it has names of its own."""
    inside = [each for each in module.modules.values() if not each.is_alias and not each.name.startswith("_")]
    return [each for each in (module, *inside) if any(True for _ in _own(each))]


def _own(module: griffe.Module) -> Iterator[griffe.Object]:
    """Functions and classes that are defined in a module and public."""
    for name, member in module.members.items():
        if not name.startswith("_") and not member.is_alias and (member.is_function or member.is_class):
            assert isinstance(member, griffe.Object)
            yield member


def public(name: str) -> Iterator[griffe.Object]:
    """Every public object of a room, and public methods and properties of its classes."""
    module = room(name)
    if module.exports:
        found = [module[each] for each in exported(module) if not each.startswith("__")]
        objects = [each.final_target if isinstance(each, griffe.Alias) else each for each in found]
    else:
        objects = [module, *(each for part in modules(module) for each in (part, *_own(part)))]
    for each in objects:
        yield each
        if each.is_class:
            yield from (
                member
                for title, member in each.members.items()
                if not title.startswith("_") and not member.is_alias and _has_code(member)
            )


def _has_code(member: griffe.Object | griffe.Alias) -> bool:
    return member.is_function or "property" in member.labels


def undocumented() -> list[str]:
    """Public names without a docstring."""
    names = ("headtrace", *(f"headtrace.{name}" for name in ROOMS))
    return sorted({each.path for name in names for each in public(name) if not _documented(each)})


def _documented(found: griffe.Object) -> bool:
    """Whether a name has a docstring, or does what one of a class above it says."""
    above = found.parent.mro() if isinstance(found.parent, griffe.Class) else []
    others = [each.members.get(found.name) for each in above]
    return found.has_docstring or any(other is not None and other.has_docstring for other in others)
