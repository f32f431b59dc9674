"""Methods: ways to find the causes of firings, known by name, each a class whose fields are its options.

>>> make_method("acc++", tau=0.3, ig_steps=32)
ACCpp(tau=0.3, ig_steps=32)
>>> make_method("svt").describe().tau
0.5
>>> [(each.name, each.type.__name__, each.default) for each in method_options("acc++")]
[('tau', 'float', None), ('ig_steps', 'int', 64)]
>>> method_options("svt")[1].choices
('signal', 'all')

A package of your own adds one by subclassing ``Method`` (a frozen dataclass) and calling
``register_method("name", Class)``, or through the entry point group ``headtrace.methods``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Real
from operator import ge, gt, le
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from headtrace import __version__
from headtrace.circuits import MethodInfo
from headtrace.errors import InputError, shown
from headtrace.registry import Registry, create
from headtrace.tracing.causes import Causes
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    from headtrace.models import Recording
    from headtrace.tracing.components import Firings
    from headtrace.tracing.readings import Composer

Tau = float | Callable[[int], float] | None
"""A threshold on attention: a number, or a function of the number of visible keys; None is the method's own."""


@dataclass(frozen=True)
class Option:
    """One option of a method, as the command line, the server and files offer it."""

    name: str
    type: type[bool] | type[int] | type[float] | type[str]
    default: Any
    """None means that the method decides."""
    help: str = ""
    choices: tuple[Any, ...] | None = None
    above: float | None = None
    """Values must be larger than this."""
    at_least: float | None = None
    at_most: float | None = None

    def require(self, value: Any) -> None:
        """Raise ``InputError`` for a value that is not allowed. None (if it is the default) and functions are."""
        if (value is None and self.default is None) or callable(value):
            return
        if self.choices is not None:
            expected, fits = " or ".join(map(repr, self.choices)), value in self.choices
        else:
            types = (int, float) if self.type is float else self.type
            fits = isinstance(value, types) and not (isinstance(value, bool) and self.type is not bool)
            words: list[str] = []
            for word, limit, within in (
                ("above", self.above, gt),
                ("at least", self.at_least, ge),
                ("at most", self.at_most, le),
            ):
                if limit is not None:
                    words.append(f"{word} {limit:g}")
                    fits = fits and within(float(value), limit)  # type: ignore[arg-type]
            names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
            expected = f"{names[self.type]} {' and '.join(words)}".rstrip()
        if not fits:
            raise InputError(f"{self.name}={value!r}: expected {expected}.")


EdgeWeight = Literal["attention removed", "relative attention", "coefficients"]
"""What the weight of a query or key edge measures: the attention that removing the signal takes away, the signal's part
of relative attention, or what a whole head adds to the channel coefficients along the token's own signs."""


THRESHOLD_RULES: dict[str, Callable[[int], float]] = {
    "min(0.9, 2.5 / visible keys)": lambda visible_keys: min(0.9, 2.5 / visible_keys),
    # Before 0.3. With two visible keys no attention counts but exactly 1, so whether it does is a matter of rounding.
    "min(1, 2.5 / visible keys)": lambda visible_keys: min(1.0, 2.5 / visible_keys),
}
"""Default thresholds by the text that circuit files keep; the first is the present one."""


@dataclass(frozen=True)
class Method(ABC):
    """How the causes of a firing are found.

    The fields are the options; ``field(default=..., metadata={...})`` gives them a ``help`` text and limits (``above``,
    ``at_least``, ``at_most``), which are checked. The class attributes say what the results mean, so that
    ``headtrace.verify`` can test them.
    """

    name: ClassVar[str]
    rule: ClassVar[str | float] = next(iter(THRESHOLD_RULES))
    """The threshold without ``tau``, as shown to users."""
    edge_weight: ClassVar[EdgeWeight | None] = None
    """What ``verify`` recomputes weights as; None: they are not checked."""
    explained_when: ClassVar[Literal["below threshold", "causes on both sides"] | None] = None
    """When a firing counts as explained; None: that is not checked."""
    explains_groups: ClassVar[bool] = False
    """Whether it can explain attention on several sources together."""
    whole_heads: ClassVar[bool] = False
    """Whether an upstream head stands for its whole write, shown at the source that it attends to most."""

    tau: Tau = field(
        default=None,
        metadata={"help": "The least attention that counts as attending.", "above": 0, "at_most": 1},
    )

    def __post_init__(self) -> None:
        for each in options_of(type(self)):
            each.require(getattr(self, each.name))

    @abstractmethod
    def trace(self, recording: Recording, firings: Firings, composer: Composer) -> list[Causes]:
        """Causes of many firings."""

    def default_threshold(self, visible_keys: int) -> float:
        """Attention below which a head no longer counts as attending."""
        return THRESHOLD_RULES[str(self.rule)](visible_keys)

    def threshold(self, visible_keys: int, sources: int = 1) -> float:
        """Attention that counts as attending with this many visible keys: by ``tau``, or the default.

        Attention on several sources together counts from as many times that, or from half way between chance and all
        of it, whichever is less.
        """
        if self.tau is None:
            limit = self.default_threshold(visible_keys)
        else:
            limit = self.tau(visible_keys) if callable(self.tau) else self.tau
            if not isinstance(limit, Real) or not math.isfinite(limit):
                raise InputError(
                    f"tau({visible_keys}) is {shown(limit)}: a function for tau gives the attention that counts as "
                    "attending with so many visible keys, a finite number."
                )
            limit = float(limit)
        return limit if sources == 1 else min(limit * sources, (1 + sources / visible_keys) / 2)

    def thresholds(self, longest: int) -> list[float] | None:
        """The values of a ``tau`` that is a function, for 1 to ``longest`` visible keys; None for a number or the
        method's own rule, which the description names."""
        return [self.threshold(n) for n in range(1, longest + 1)] if callable(self.tau) else None

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


# -- the methods of headtrace: their options here, their steps in modules that need torch -----------------------

IG_STEPS = 64
FIRES_ABOVE = 0.5
"""SVT: attention above which a head fires."""


@dataclass(frozen=True)
class ACCpp(Method):
    """Signals by integrated gradients and greedy removal (`headtrace.tracing.accpp`): the default."""

    name: ClassVar[str] = "acc++"
    edge_weight: ClassVar = "attention removed"
    explained_when: ClassVar = "below threshold"
    explains_groups: ClassVar = True
    ig_steps: int = field(
        default=IG_STEPS, metadata={"help": "Number of steps of integrated gradients.", "at_least": 1}
    )

    def trace(self, recording: Recording, firings: Firings, composer: Composer) -> list[Causes]:
        from headtrace.tracing.accpp import trace_firings

        return trace_firings(self, recording, firings, composer)


@dataclass(frozen=True)
class ACC(Method):
    """Components that make up the relative attention inside the head's active channels
    (`headtrace.tracing.earlier_methods`)."""

    name: ClassVar[str] = "acc"
    edge_weight: ClassVar = "relative attention"
    explained_when: ClassVar = "causes on both sides"

    def trace(self, recording: Recording, firings: Firings, composer: Composer) -> list[Causes]:
        from headtrace.tracing.earlier_methods import trace_acc

        return trace_acc(self, recording, firings, composer)


@dataclass(frozen=True)
class SVT(Method):
    """Upstream heads only; each stands for its whole write, shown at the source it attends to most
    (`headtrace.tracing.earlier_methods`)."""

    name: ClassVar[str] = "svt"
    rule: ClassVar[str | float] = FIRES_ABOVE
    edge_weight: ClassVar = "coefficients"
    explained_when: ClassVar = "causes on both sides"
    whole_heads: ClassVar[bool] = True
    channels: Literal["signal", "all"] = field(
        default="signal",
        metadata={
            "help": "Channels to follow: signal (the head's signal set) or all (the control without the SVD)."
        },
    )

    def default_threshold(self, visible_keys: int) -> float:
        return FIRES_ABOVE

    def follows(self, firing: Firing, attention: float, visible_keys: int) -> bool:
        # It looks for upstream heads, and layer 0 has none.
        return attention > self.threshold(visible_keys) and firing.src != 0 and firing.layer > 0

    def trace(self, recording: Recording, firings: Firings, composer: Composer) -> list[Causes]:
        from headtrace.tracing.earlier_methods import trace_svt

        return trace_svt(self, recording, firings, composer)


METHODS: Registry[type[Method]] = Registry(
    "method", "headtrace.methods", {each.name: each for each in (ACCpp, ACC, SVT)}, check=_is_method
)
"""Every known method by its name; those of installed packages are found by entry point."""


def register_method(name: str, method: type[Method]) -> None:
    """Make a method known under a name, for this process."""
    METHODS.add(name, method)


def make_method(method: str | Method, **options: Any) -> Method:
    """A method by name, with its options; a ``Method`` is returned unchanged."""
    return create(METHODS, method, options)


def method_options(name: str) -> tuple[Option, ...]:
    """The options of a method by its name: what the command line and the server offer, and files keep."""
    if name not in METHODS:
        raise InputError(f"There is no method {name!r}: choose {', '.join(map(repr, METHODS))}.")
    return options_of(METHODS[name])


def options_of(method: type[Method]) -> tuple[Option, ...]:
    """The options of a method class: type and choices from each field's annotation, the rest from its metadata."""
    hints = get_type_hints(method)
    found: list[Option] = []
    for each in fields(method):
        hint = hints[each.name]
        union = get_origin(hint) in (Union, UnionType)
        choices = get_args(hint) if get_origin(hint) is Literal else None
        kinds = map(type, choices) if choices else get_args(hint) if union else (hint,)
        kind = next((kind for kind in kinds if kind in (bool, int, float, str)), str)
        found.append(Option(each.name, kind, each.default, choices=choices, **each.metadata))
    return tuple(found)
