"""What headtrace does to a running model, for the thread that runs it alone.

A model may be used by others while headtrace uses it: a thread that generates, a server, a training loop. Hooks,
replaced methods and the attention implementation belong to the module, which all threads share, so each of them asks
whether the thread that calls is the one that holds the model's lock; in every other thread the model is what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from threading import Lock, get_ident
from typing import Any

Settings = tuple[Any, Mapping[str, Any]]
"""A config, and what its fields are in this thread."""
_settings: ContextVar[Settings | None] = ContextVar("headtrace_settings", default=None)
_held: dict[int, int] = {}
"""By the id of a config, how many threads have settings of their own for it: models may share a config."""
_lock = Lock()
FIELDS = ("_attn_implementation", "_experts_implementation", "return_dict")
"""The fields of a config that headtrace sets while it runs a model."""


def in_this_thread(
    act: Callable[..., Any], otherwise: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A function that acts when the present thread calls it; for others ``otherwise`` (of a hook: nothing).

    >>> from threading import Thread
    >>> found = []
    >>> hook = in_this_thread(found.append)
    >>> for number in (1, 2):
    ...     hook(number)
    ...     other = Thread(target=hook, args=(-number,)); other.start(); other.join()
    >>> found
    [1, 2]
    """
    owner = get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        if get_ident() == owner:
            return act(*args, **kwargs)
        return None if otherwise is None else otherwise(*args, **kwargs)

    return called


@contextmanager
def settings(config: Any, **values: Any) -> Generator[None]:
    """Inside, fields of a config (`FIELDS`) have these values, for this thread alone."""
    with _lock:
        if not _held.get(id(config)):
            object.__setattr__(config, "__class__", _by_thread(type(config)))
        _held[id(config)] = _held.get(id(config), 0) + 1
    token = _settings.set((config, values))
    try:
        yield
    finally:
        _settings.reset(token)
        with _lock:
            _held[id(config)] -= 1
            if not _held[id(config)]:
                del _held[id(config)]
                object.__setattr__(config, "__class__", type(config).__mro__[1])


@cache
def _by_thread(kind: type[Any]) -> type[Any]:
    """A config class whose `FIELDS` may differ by thread; equal to ``kind`` in everything else, copies included."""

    def reduce(config: Any, protocol: Any) -> Any:
        make, (_, *more), *rest = super(made, config).__reduce_ex__(protocol)
        return (make, (kind, *more), *rest)

    own = {name: _field(kind, name) for name in FIELDS}
    made = type(kind.__name__, (kind,), {**own, "__reduce_ex__": reduce, "__module__": kind.__module__})
    return made


def _field(kind: type[Any], name: str) -> property:
    known = next(
        (vars(base)[name] for base in kind.__mro__ if isinstance(vars(base).get(name), property)), None
    )

    def get(config: Any) -> Any:
        mine = _settings.get()
        if mine is not None and mine[0] is config and name in mine[1]:
            return mine[1][name]
        return vars(config)[name] if known is None else known.fget(config)

    def put(config: Any, value: Any) -> None:
        if known is None:
            vars(config)[name] = value
        else:
            known.fset(config, value)

    return property(get, put)
