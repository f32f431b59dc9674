"""Methods: ways to find the causes of firings, known by name, each an object with its own options.

>>> make_method("acc++", tau=0.3, ig_steps=32)
ACCpp(tau=0.3, ig_steps=32)
>>> make_method("svt").describe().tau
0.5

A package of your own adds one by subclassing ``Method`` (a frozen dataclass whose fields are its options) and calling
``register_method("name", Class)``, or through the entry point group ``headtrace.methods``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from headtrace import __version__
from headtrace.circuits import MethodInfo
from headtrace.errors import InputError
from headtrace.registry import Registry, made
from headtrace.tracing.causes import Causes
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    from headtrace.models import Recording
    from headtrace.tracing.upstream import Composer, Firings

Tau = float | Callable[[int], float] | None
"""A threshold on attention: a number, or a function of the number of visible keys; None is the method's own."""


@dataclass(frozen=True)
class Method(ABC):
    """How the causes of a firing are found. The fields are the options."""

    name: ClassVar[str]
    rule: ClassVar[str | float] = "min(1, 2.5 / visible keys)"
    """The threshold without ``tau``, for people."""

    tau: Tau = None
    """Attention that counts as attending."""

    def __post_init__(self) -> None:
        if self.tau is not None and not callable(self.tau) and not 0 < self.tau <= 1:
            raise InputError(f"tau={self.tau}: a threshold on attention is above 0 and at most 1.")

    @abstractmethod
    def trace(self, recording: Recording, firings: Firings, composer: Composer) -> list[Causes]:
        """Causes of many firings."""

    def default_threshold(self, visible_keys: int) -> float:
        """Attention below which a head no longer counts as attending."""
        return min(1.0, 2.5 / visible_keys)

    def threshold(self, visible_keys: int) -> float:
        """Attention that counts as attending, with so many visible keys: what ``tau`` says, or the default."""
        if self.tau is None:
            return self.default_threshold(visible_keys)
        return float(self.tau(visible_keys)) if callable(self.tau) else float(self.tau)

    def follows(self, firing: Firing, attention: float, visible_keys: int) -> bool:
        """Whether a firing is traced further."""
        return attention >= self.threshold(visible_keys)

    def describe(self) -> MethodInfo:
        """The method and its options as a circuit file keeps them."""
        tau = self.rule if self.tau is None else "custom" if callable(self.tau) else float(self.tau)
        options: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tau"}
        steps = options.pop("ig_steps", None)
        return MethodInfo(self.name, tau=tau, ig_steps=steps, version=__version__, settings=options or None)


def _is_method(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Method)


METHODS: Registry[type[Method]] = Registry("method", "headtrace.methods", {}, check=_is_method)
"""Every known method by its name; those of installed packages are found by entry point."""


def register_method(name: str, method: type[Method]) -> None:
    """Make a method known under a name, for this process."""
    METHODS.add(name, method)


def make_method(method: str | Method, **options: Any) -> Method:
    """A method by name, with its options; one that is already made is taken as it is."""
    return made(METHODS, method, options)
