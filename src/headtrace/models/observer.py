"""What may watch or change a forward pass: an observer, and the places where it is called.

Places are named as headtrace names them, not as a model's modules are called: `headtrace.models.forward`
knows where they are in each architecture, and puts a hook only where an observer's class has something to do.

Only the thread that runs a model sees any of it. A model may be used by others while headtrace uses it: a thread that
generates, a server, a training loop. Hooks, replaced methods and the attention implementation belong to the module,
which all threads share, so each of them asks whether the thread that calls is the one that holds the model's lock; in
every other thread the model is what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from threading import Lock, get_ident
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

NormPlace = Literal["query", "key", "attention_post_norm", "mlp_norm", "mlp_post_norm"]
"""Norms inside a block whose scales are frozen; those before attention follow from the residuals."""


@dataclass(frozen=True)
class AttentionCall:
    """What one layer's attention was called with."""

    layer: int
    query: Float[Tensor, "batch head dest d_head"]
    key: Float[Tensor, "batch kv_head src d_head"]
    value: Float[Tensor, "batch kv_head src d_head"]
    mask: Float[Tensor, "#batch #head dest src"] | None
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class Rotary:
    """Rotary positions as the model made them for one layer: ``q <- q * cos + rotate(q) * sin``, half-split."""

    cos: Float[Tensor, "#batch token rotary"]
    sin: Float[Tensor, "#batch token rotary"]

    def rotate(self, x: Float[Tensor, "batch head token d_head"]) -> Float[Tensor, "batch head token d_head"]:
        """Turn queries or keys as the model does; dimensions beyond the rotary ones stay."""
        width = self.cos.shape[-1]
        turned, rest = x[..., :width], x[..., width:]
        half = width // 2
        quarter_turn = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
        turned = turned * self.cos[:, None] + quarter_turn * self.sin[:, None]
        return torch.cat((turned, rest), dim=-1)

    @property
    def inverse(self) -> Rotary:
        """The turn back: the transpose over cos^2 + sin^2 (which scaled rotary makes differ from one)."""
        size = self.cos.square() + self.sin.square()
        return Rotary(self.cos / size, -self.sin / size)


class Observer:
    """Sees a forward pass, and may act on it. Subclasses override the places they need.

    A place that returns a tensor puts it where the model's own was; None leaves everything as it is.
    """

    def watches(self, place: str) -> bool:
        """Whether this observer has something to do at a place: if its class says what."""
        return getattr(type(self), place) is not getattr(Observer, place)

    def position_embedding(self, write: Tensor) -> Tensor | None:
        """What is added to the token embeddings because of their positions: (1 or batch, token, d_model). Only models
        with such a module (``Architecture.position_embedding``) have this place."""

    def layer_input(self, layer: int, residual: Tensor, rotary: Rotary | None) -> Tensor | None:
        """The residual at the input of a layer: (batch, token, d_model)."""

    def query_input(self, layer: int, residual: Tensor) -> Tensor | None:
        """The residual before a layer's attention, norm not yet applied: another one for its queries alone to read."""

    def key_input(self, layer: int, residual: Tensor) -> Tensor | None:
        """The same for its keys alone; values, and everything else, read the model's own."""

    def edit_scores(self, call: AttentionCall, scores: Float[Tensor, "batch head dest src"]) -> None:
        """Change scores in place, before softcap and mask: here one head's one destination can see other keys."""

    def pattern_buffer(self, call: AttentionCall) -> Tensor | None:
        """Where the attention pattern should be written, or None for a new tensor."""

    def mix(self, call: AttentionCall, pattern: Tensor) -> Float[Tensor, "batch head dest d_head"] | None:
        """Another mixture of values than ``pattern @ values``, or None."""

    def takes_rows(self) -> bool:
        """Whether it has no need of a layer's scores and pattern as a whole: then long prompts are attended to some
        rows at a time."""
        return not any(map(self.watches, ("edit_scores", "pattern_buffer", "mix", "see")))

    def needs_rows(self) -> bool:
        """Whether it is to be shown rows whatever the length of the prompt; no other observer may then need a whole."""
        return False

    def see_rows(
        self,
        call: AttentionCall,
        first: int,
        logits: Float[Tensor, "batch head dest src"],
        pattern: Float[Tensor, "batch head dest src"],
    ) -> None:
        """Called with some rows of a layer's attention, from the destination ``first`` on, where rows are taken."""

    def rows_seen(self, call: AttentionCall) -> None:
        """Called after all rows of a layer, in the place of ``see``."""

    def see(self, call: AttentionCall, pattern: Float[Tensor, "batch head dest src"]) -> None:
        """Called with the pattern of a layer."""

    def attention_write(self, layer: int, write: Tensor) -> Tensor | None:
        """What attention adds to the residual, after its norm if it has one: (batch, token, d_model)."""

    def mlp_input(self, layer: int, read: Tensor) -> Tensor | None:
        """What the MLP reads, after its norm if it has one: (batch, token, d_model)."""

    def mlp_write(self, layer: int, write: Tensor) -> Tensor | None:
        """What the MLP adds to the residual: (batch, token, d_model)."""

    def norm_input(self, place: NormPlace, layer: int, x: Tensor, norm: nn.Module) -> None:
        """What a norm inside a block is about to normalise, with the axes that the model gives it."""

    def final_input(self, residual: Tensor) -> None:
        """The residual at the input of the final norm, or of the unembedding where there is none."""


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
