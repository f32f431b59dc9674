"""Things known by name, to which another package can add its own without a fork.

>>> shapes = Registry("shape", "example.shapes", {"round": 1})
>>> shapes.add("square", 4)
>>> shapes["square"], "square" in shapes, sorted(shapes)
(4, True, ['round', 'square'])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from importlib.metadata import entry_points
from typing import Any, TypeVar

from headtrace.errors import HeadtraceError, InputError

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """A mapping of names to things: those of headtrace, those added by hand, those of installed entry points.

    Entry points are read when the mapping is first used. Their name is the key; a name that is already taken, a
    thing that cannot be imported or is not what it should be, is an error that names the package's entry.
    """

    def __init__(
        self, what: str, group: str, known: Mapping[str, T], check: Callable[[object], bool] = lambda _: True
    ) -> None:
        self.what, self.group = what, group
        self._known, self._check, self._read = dict(known), check, False

    def add(self, name: str, thing: T) -> None:
        """Make something known under a name that is still free (or that stands for the very same thing)."""
        if not self._check(thing):
            raise InputError(f"{thing!r} is not something to register as {self.what} {name!r}.")
        if self._known.setdefault(name, thing) != thing:
            raise InputError(f"The {self.what} {name!r} is already known: choose another name.")

    def fits(self, thing: object) -> bool:
        """Whether something could be registered here."""
        return self._check(thing)

    def _all(self) -> dict[str, T]:
        if not self._read:
            for point in entry_points(group=self.group):
                try:
                    thing = point.load()
                except Exception as error:
                    raise HeadtraceError(
                        f"The {self.what} {point.name!r} of the installed entry point {point.value!r} cannot be "
                        f"imported: {error}. Fix or uninstall that package."
                    ) from error
                self.add(point.name, thing)
            self._read = True
        return self._known

    def __getitem__(self, name: str) -> T:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def create(known: Registry[type[T]], given: str | T, options: Mapping[str, Any]) -> T:
    """An object of the class registered under a name, with its options (its fields); an object is returned as is."""
    what = known.what
    if not isinstance(given, str) and known.fits(type(given)):
        if options:
            raise InputError(
                f"{given!r} has its options already: give {', '.join(options)} to it, or a name here."
            )
        return given
    if not isinstance(given, str) or given not in known:
        raise InputError(f"There is no {what} {given!r}: choose {', '.join(map(repr, known))}.")
    found: Any = known[given]
    takes = [field.name for field in fields(found)]
    for name in options:
        if name not in takes:
            listed = ", ".join(takes) or "none"
            raise InputError(f"The {what} {given!r} has no option {name!r}: it takes {listed}.")
    return found(**options)
