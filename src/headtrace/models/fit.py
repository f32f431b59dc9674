"""Whether an architecture's facts fit a model: its modules are where the facts say, and its matrices have their sizes.

What does not fit is an ``UnsupportedModelError`` that names the fact. Whether the model also *computes* what the facts
say is measured: by `Recording.check` for one prompt, by `headtrace.models.conformance` for the facts themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from headtrace.errors import UnsupportedModelError
from headtrace.models.architectures import HOW_TO_ADD, Architecture, Projections
from headtrace.models.weights import norm_eps

SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size")
"""What a config must say under these names (or map them by transformers' ``attribute_map``)."""
PARTS = ("attention", "mlp", "mlp_write")
NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
"""Facts that are paths from a block."""


def wrong_fact(facts: Architecture, fact: str, found: str) -> UnsupportedModelError:
    """The error for a fact that does not fit."""
    said = getattr(facts, fact)
    stated = "" if callable(said) else f" = {said!r}"
    return UnsupportedModelError(
        f"The facts of {facts.name} do not fit this model: {fact}{stated}, but {found} Correct that fact of the "
        f"Architecture ({HOW_TO_ADD})."
    )


def require_sizes(facts: Architecture, config: Any) -> None:
    """The config says how many layers and heads there are, and how wide the residual is."""
    for name in SIZES:
        if not isinstance(getattr(config, name, None), int):
            raise UnsupportedModelError(
                f"The config of this {facts.name} model ({type(config).__name__}) does not say {name!r} as a number, "
                f"which headtrace reads, with {', '.join(repr(each) for each in SIZES if each != name)}. If it is "
                f"called otherwise there, say so in the config class: attribute_map = {{{name!r}: ...}}."
            )


def fitted(facts: Architecture, hf: nn.Module) -> Architecture:
    """The facts with norms that are ``nn.Identity`` left out, once all modules are where the facts say."""
    blocks = list(_module(facts, "layers", hf, "the model").children())
    for fact in PARTS:
        for index, block in enumerate(blocks):
            _module(facts, fact, block, f"block {index}")
    left_out: dict[str, None] = {}
    for fact in (*NORMS, "final_norm"):
        if getattr(facts, fact) is None:
            continue
        places = (
            [(hf, "the model")] if fact == "final_norm" else [(b, f"block {i}") for i, b in enumerate(blocks)]
        )
        norms = [_module(facts, fact, *place) for place in places]
        absent = [isinstance(norm, nn.Identity) for norm in norms]
        if all(absent):
            left_out[fact] = None
        elif any(absent):
            raise wrong_fact(
                facts, fact, f"it is an nn.Identity in {places[absent.index(True)][1]} and a norm in others."
            )
        else:
            _require_epsilons(facts, fact, norms)
    for path in facts.query_key_norm or ():
        inside = [block.get_submodule(facts.attention) for block in blocks]
        norms = [
            _module(facts, "query_key_norm", attention, f"the attention of block {index}", path)
            for index, attention in enumerate(inside)
        ]
        _require_epsilons(facts, "query_key_norm", norms)
    return replace(facts, **left_out) if left_out else facts


def _module(
    facts: Architecture, fact: str, root: nn.Module, where: str, path: str | None = None
) -> nn.Module:
    """The module that a fact names, or an error that says what is there instead."""
    path = getattr(facts, fact) if path is None else path
    at = root
    for name in path.split(".") if path else ():
        inside = dict(at.named_children())
        if name not in inside:
            there = ", ".join(inside) or "no modules"
            raise wrong_fact(facts, fact, f"{where} has no {name!r} there: {type(at).__name__} has {there}.")
        at = inside[name]
    return at


def _require_epsilons(facts: Architecture, fact: str, norms: list[nn.Module]) -> None:
    norm: nn.Module | None = None
    try:
        for norm in norms:
            norm_eps(norm)
    except AttributeError:
        raise wrong_fact(
            facts,
            fact,
            f"{type(norm).__name__} there is no norm that headtrace knows: expected one with a number called eps "
            "or variance_epsilon. Where there is no norm, leave the fact out (final_norm: None).",
        ) from None


def residual_norms(hf: nn.Module, facts: Architecture) -> Iterator[nn.Module]:
    """Every norm of the residual or of what is written into it, block by block, then the final one."""
    for block in hf.get_submodule(facts.layers).children():
        for fact in NORMS:
            path: str | None = getattr(facts, fact)
            if path is not None:
                yield block.get_submodule(path)
    if facts.final_norm is not None:
        yield hf.get_submodule(facts.final_norm)


def require_heads(facts: Architecture, blocks: list[nn.Module], sizes: Sizes) -> None:
    """The projections of every layer have as many heads of such a size as the config and the facts say."""
    if facts.head_sizes is not None:
        if len(facts.head_sizes) != len(blocks):
            raise wrong_fact(
                facts, "head_sizes", f"the model has {len(blocks)} layers: one size for each is expected."
            )
        if facts.rotary and facts.rotary_pairs == "interleaved" and len(set(facts.head_sizes)) > 1:
            raise wrong_fact(
                facts,
                "head_sizes",
                "interleaved rotary pairs (rotary_pairs) are only known for heads of one size.",
            )
    seen: set[tuple[Any, ...]] = set()
    for index, block in enumerate(blocks):
        attention = block.get_submodule(facts.attention)
        d_head = sizes.d_head if facts.head_sizes is None else facts.head_sizes[index]
        # Blocks of the same shapes are read alike: a fused projection is not split once for every layer.
        shapes = (type(attention), d_head, *(tuple(parameter.shape) for parameter in attention.parameters()))
        if shapes not in seen:
            seen.add(shapes)
            heads = read_by(
                facts, "projections", lambda a=attention, d=d_head: facts.projections(a, d), index
            )
            sizes.check(facts, heads, d_head, index)


def read_by(facts: Architecture, fact: str, read: Callable[[], Any], index: int) -> Any:
    """What a fact that is a function makes of a block."""
    try:
        return read()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise wrong_fact(facts, fact, f"reading block {index} by it fails: {reason}.") from error


class Sizes:
    """How many heads of what size a model has, by its config and its facts."""

    def __init__(self, n_heads: int, n_kv_heads: int, d_model: int, d_head: int) -> None:
        self.n_heads, self.n_kv_heads, self.d_model, self.d_head = n_heads, n_kv_heads, d_model, d_head

    def check(self, facts: Architecture, heads: Projections, d_head: int, index: int) -> None:
        """The matrices and biases of one layer have these sizes."""
        rows = {"Q": self.n_heads, "K": self.n_kv_heads, "V": self.n_kv_heads}
        expected: dict[str, tuple[int, ...]] = {
            **{f"W_{name}": (n, self.d_model, d_head) for name, n in rows.items()},
            "W_O": (self.n_heads, d_head, self.d_model),
            **{f"b_{name}": (n, d_head) for name, n in rows.items()},
            "b_O": (self.d_model,),
        }
        for name, shape in expected.items():
            found = getattr(heads, name)
            if found is not None and tuple(found.shape) != shape:
                fact = "projections" if facts.head_sizes is None else "head_sizes"
                if name[-1] in "KV" and found.shape[1:] == shape[1:]:
                    fact = "n_kv_heads"
                raise wrong_fact(
                    facts,
                    fact,
                    f"block {index} has {name} as {tuple(found.shape)}, and {shape} is expected: "
                    f"{self.n_heads} heads ({self.n_kv_heads} for keys and values) of {d_head} dimensions and a "
                    f"residual of {self.d_model}, by the config. Where layers have heads of other sizes, say so in "
                    "head_sizes.",
                )
