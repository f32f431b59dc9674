"""Run a model: the one place that does, ``forward``, one pass at a time.

A model has one lock: threads that use headtrace wait their turn, and a pass that somebody else makes meanwhile is what
it would be without headtrace (`headtrace.models.observer`). Inside, the model attends through headtrace's attention
function, hooks call the observers at the places they care about, layers outside a range hand their input on;
afterwards, whatever happened, the model is as it was: attention implementation, hooks, forward methods, training mode.

Where a model is spread over devices, observers see everything on ``model.device``, where recordings and what they put
in are kept; what they give back follows the layer that it goes into. Attention that they watch is computed there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headtrace.errors import HeadtraceError, IdentityError, UnsupportedModelError
from headtrace.models.attention import NAME, Watch, is_rereading, replace_own_attention, rereading, watching
from headtrace.models.devices import every_module, exact
from headtrace.models.fit import residual_norms
from headtrace.models.observer import NormPlace, Observer, Rotary, in_this_thread, settings
from headtrace.models.weights import norm_bias, norm_eps, norm_gain, norm_scale
from headtrace.progress import check

if TYPE_CHECKING:
    from headtrace.models.model import Model

EXPERTS_IN_FLOAT64 = {"_experts_implementation": "eager"}
"""Mixtures of experts in float64 compute one expert after the other: grouped matrix products have no float64."""
NORM_ROUNDING = 1e-5
"""By how much a norm that transformers computes in float32 may differ from the same in float64."""


class ModelLock:
    """The lock of a model, which knows its owner: a thread that holds it cannot wait for itself."""

    def __init__(self) -> None:
        self._lock, self._owner = Lock(), None

    def __enter__(self) -> None:
        if self._owner == get_ident():
            raise HeadtraceError(
                "The model is already running in this thread: a pass cannot be begun from inside another one "
                "(from a hook or an observer). Finish the first one, then start the second."
            )
        self._lock.acquire()
        self._owner = get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = None
        self._lock.release()


_locks: WeakKeyDictionary[nn.Module, ModelLock] = WeakKeyDictionary()
_locks_lock = Lock()


@contextmanager
def _session(model: Model) -> Generator[ExitStack]:
    """The model locked for this thread and in evaluation mode; whatever is put on the stack is undone afterwards.

    A Hugging Face model has one lock, however many ``Model`` objects share it.
    """
    check()  # whoever has cancelled the work need not wait for this pass
    model.refresh()  # what is wrong with the weights is said before they are used
    with _locks_lock:
        lock = _locks.setdefault(model.hf, ModelLock())
    with lock, ExitStack() as stack:
        for module in [module for module in every_module(model.hf) if module.training]:
            stack.callback(setattr, module, "training", True)
            module.training = False
        yield stack


def forward(
    model: Model,
    token_ids: Int[Tensor, "batch token"],
    *observers: Observer,
    lengths: Sequence[int] | None = None,
    keep: Int[Tensor, "batch kept"] | None = None,
    layers: range | None = None,
    residual: Float[Tensor, "batch token d_model"] | None = None,
    grad: bool = False,
) -> Float[Tensor, "batch kept vocab"]:
    """One forward pass of the model itself on right-padded prompts, watched by observers; its output logits.

    ``keep`` gives the positions of each prompt at which logits are computed (None: all). With ``layers`` only those
    run, the first of them from ``residual``: an intervention at layer 9 starts from the recorded residual there.
    With ``grad`` what observers put in can be differentiated through (the model's own parameters cannot).
    """
    options: dict[str, Any] = {"use_cache": False} if _accepts(type(model.hf), "use_cache") else {}
    if lengths is not None and len(set(lengths)) > 1:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        options["attention_mask"] = (positions < positions.new_tensor(lengths)[:, None]).long()
    with _session(model) as stack, torch.inference_mode(not grad), torch.set_grad_enabled(grad):
        if grad:  # parameters are constants of this pass: nothing is kept for gradients that are not needed
            for parameter in model.hf.parameters():
                if parameter.requires_grad and parameter.device.type != "meta":
                    stack.callback(parameter.requires_grad_, True)
                    parameter.requires_grad_(False)
        if layers is not None:
            _run_only(model, layers, residual, stack)
        _observe(model, observers, token_ids, stack)
        if keep is not None:
            _unembed_only(model, keep, stack)
        output: Any = model.hf(input_ids=token_ids, **options)
    return output.logits.to(model.device, model.dtype)


@dataclass(frozen=True)
class KeptKeys:
    """Keys and values of one prompt, layer by layer: prompts that begin alike need not compute them again."""

    layers: tuple[tuple[Tensor, Tensor], ...]


def forward_keeping(
    model: Model, token_ids: Int[Tensor, "1 token"]
) -> tuple[Float[Tensor, "1 token vocab"], KeptKeys | None]:
    """One pass over a prompt: its output logits, and its keys and values, if the model hands them out whole."""
    if not all(_accepts(type(model.hf), name) for name in ("past_key_values", "use_cache")):
        return forward(model, token_ids), None
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    logits = _continue(model, token_ids, cache)
    kept = tuple((layer.keys, layer.values) for layer in cache.layers)
    whole = len(kept) == model.n_layers and all(
        keys is not None and keys.shape[-2] == token_ids.shape[1] for keys, _ in kept
    )
    return logits, KeptKeys(kept) if whole else None


def forward_behind(
    model: Model, kept: KeptKeys, start: int, token_ids: Int[Tensor, "batch token"]
) -> Float[Tensor, "batch token vocab"]:
    """Output logits of prompts whose first ``start`` tokens are those of a kept one; ``token_ids`` are the others."""
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    for layer, both in enumerate(kept.layers):
        cache.update(*(x[..., :start, :].expand(len(token_ids), -1, -1, -1) for x in both), layer)
    return _continue(model, token_ids, cache)


def _continue(model: Model, token_ids: Tensor, cache: Any) -> Tensor:
    """The model on tokens behind those whose keys and values are in the cache, which keeps theirs as well."""
    with _session(model) as stack, torch.inference_mode():
        _observe(model, (), token_ids, stack)
        output: Any = model.hf(input_ids=token_ids, past_key_values=cache, use_cache=True)
    return output.logits.to(model.device, model.dtype)


def own_logits(
    model: Model, token_ids: Int[Tensor, "batch token"], lengths: Sequence[int]
) -> Float[Tensor, "batch token vocab"]:
    """Output logits of the model alone on right-padded prompts: nothing of headtrace's takes part."""
    options = dict[str, Any]()
    if len(set(lengths)) > 1:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        options["attention_mask"] = (positions < positions.new_tensor(lengths)[:, None]).long()
    with _session(model) as stack, torch.inference_mode():
        if model.dtype == torch.float64:
            stack.enter_context(settings(model.config, **EXPERTS_IN_FLOAT64))
        output: Any = model.hf(input_ids=token_ids, **options)
        found: Tensor = output[0]
    return found.to(model.device, model.dtype)


def sample(
    model: Model, token_ids: Int[Tensor, "batch token"], length: int, generator: torch.Generator
) -> Int[Tensor, "batch length"]:
    """Prompts of one length continued to ``length`` tokens in all, each token drawn as the model predicts it
    (temperature one). The generator lives on the CPU, so that the same seed draws alike on every device."""
    with _session(model) as stack, torch.inference_mode():
        _set_attention(model, (), stack)
        found, new, past = token_ids, token_ids, None
        while found.shape[1] < length:
            output = _next(model, new, past)
            chances = exact(output.logits[:, -1]).softmax(-1).cpu()
            new = torch.multinomial(chances, 1, generator=generator).to(token_ids.device)
            found, past = torch.cat((found, new), dim=1), output.past_key_values
    return found


@cache
def _accepts(kind: type[nn.Module], argument: str) -> bool:
    """Whether a model's forward method takes an argument."""
    taken = signature(kind.forward).parameters
    return argument in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values())


def _next(model: Model, new: Tensor, past: Any) -> Any:
    """The model on some new tokens behind those whose keys and values it has kept."""
    lacking = [name for name in ("past_key_values", "use_cache") if not _accepts(type(model.hf), name)]
    if lacking:
        raise UnsupportedModelError(
            f"The forward method of {type(model.hf).__name__} does not take {lacking[0]!r}, so the model cannot "
            "continue a text token by token. Recording, tracing and interventions work without it."
        )
    if model.d_output != model.d_vocab:
        raise UnsupportedModelError(
            f"{model.name!r} reads {model.d_vocab} tokens and predicts {model.d_output} others: what it predicts "
            "cannot be put behind its prompt."
        )
    return model.hf(input_ids=new, past_key_values=past, use_cache=True, logits_to_keep=1)


def continue_greedily(
    model: Model,
    token_ids: Int[Tensor, "1 token"],
    n: int,
    *observers: Observer,
    prompt_only: Sequence[Observer] = (),
) -> list[int]:
    """The ``n`` tokens that follow a prompt if the likeliest is taken each time, while observers watch.

    The first pass is over the prompt, the others over one new token each, with the keys and values of those before it:
    what observers changed in them stays. Those of ``prompt_only`` watch the first pass alone.
    """
    found: list[int] = []
    new, past = token_ids, None
    with _session(model), torch.inference_mode():
        for _ in range(n):
            with ExitStack() as stack:
                _observe(model, (*prompt_only, *observers) if past is None else observers, new, stack)
                output = _next(model, new, past)
            new, past = output.logits[:, -1:].argmax(-1), output.past_key_values
            found.append(int(new))
    return found


def _observe(model: Model, observers: tuple[Observer, ...], token_ids: Tensor, stack: ExitStack) -> None:
    """Observers see the passes of the model until the stack is closed."""
    if model.dtype == torch.float64:  # first, so that the observers' hooks see what it returns
        _full_precision_norms(model, stack)
    for observer in observers:
        _Hooks(model, observer, tuple(token_ids.shape), stack).register()
    _set_attention(model, observers, stack)


def _set_attention(model: Model, observers: tuple[Observer, ...], stack: ExitStack) -> None:
    """The model attends through headtrace's function, which shows each call to the observers."""
    watch = Watch(observers, model.head_order, model.device, model.d_head)
    stack.callback(watching.reset, watching.set(watch))
    own = model.architecture.own_attention
    values: dict[str, Any] = {
        "_attn_implementation": NAME if own is None or own.method is not None else "sdpa",
        "return_dict": True,  # outputs by name, whatever the model's own setting
    }
    if model.dtype == torch.float64:
        values |= EXPERTS_IN_FLOAT64
    stack.enter_context(settings(model.config, **values))
    if own is not None:
        replace_own_attention(model, own, stack)


def _unembed_only(model: Model, keep: Int[Tensor, "batch kept"], stack: ExitStack) -> None:
    """The unembedding sees the wanted positions only: over a whole vocabulary each one costs as much as a layer."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = args[0]
        where = keep.to(x.device)[..., None]
        return (x.gather(1, where.expand(-1, -1, x.shape[-1])), *args[1:])

    unembedding: Any = model.hf.get_output_embeddings()
    stack.callback(unembedding.register_forward_pre_hook(in_this_thread(hook)).remove)


def _full_precision_norms(model: Model, stack: ExitStack) -> None:
    """Let a float64 model's norms compute in float64.

    transformers rounds to float32 inside its own norms whatever the model's dtype, so that a float64 model would be
    exact to seven digits only; with this it is a float64 model throughout. PyTorch's LayerNorm does no such thing.
    What each norm computed itself is compared with it, so that a wrong fact about norms is noticed, not followed.
    """
    facts = model.architecture
    kinds = tuple({type(norm) for norm in residual_norms(model.hf, facts)})
    kinds = tuple(kind for kind in kinds if not issubclass(kind, nn.LayerNorm))

    def hook(norm: nn.Module, args: tuple[Any, ...], own: Tensor) -> Tensor:
        x: Tensor = args[0]
        scale = norm_scale(x, norm_eps(norm), facts.norm)[..., None]
        normed = facts.centred(x) / scale * norm_gain(norm, facts, like=x)
        bias = norm_bias(norm)
        normed = normed if bias is None else normed + bias
        error = float(((normed - own).norm() / own.norm().clamp_min(1e-30)).detach())
        if not error <= NORM_ROUNDING:
            name = next(path for path, module in model.hf.named_modules() if module is norm)
            raise IdentityError(
                f"The norm {name!r} computes something else than the facts of {facts.name} say: relative error "
                f"{error:.1e}, allowed {NORM_ROUNDING:.0e}. They say norm={facts.norm!r} ('rms', or 'layer' for one "
                f"that subtracts the mean) and gain_offset={facts.gain_offset:g} (added to its weight); one of the two "
                "is wrong for this model."
            )
        return normed

    for module in model.hf.modules():
        if isinstance(module, kinds):
            stack.callback(module.register_forward_hook(in_this_thread(hook)).remove)


def _run_only(model: Model, wanted: range, residual: Tensor | None, stack: ExitStack) -> None:
    """Layers outside the range return their input; the first one inside starts from ``residual``."""

    def skip(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states, None) if model.architecture.blocks_return_tuples else hidden_states

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert residual is not None
        return _with_input(args, kwargs, residual)

    for index, layer in enumerate(model.layers):
        if index not in wanted:
            # A forward method set by others (accelerate, where weights are loaded for each pass) comes back.
            own = {name: vars(layer)[name] for name in ("forward",) if name in vars(layer)}
            stack.callback(vars(layer).update, own)
            stack.callback(vars(layer).pop, "forward")
            layer.forward = in_this_thread(skip, otherwise=layer.forward)
    if residual is not None and len(wanted):
        first = model.layers[wanted[0]]
        hook = in_this_thread(begin)
        stack.callback(first.register_forward_pre_hook(hook, with_kwargs=True, prepend=True).remove)


def _with_input(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> tuple[Any, dict[str, Any]]:
    """The arguments of a block with another residual, in the precision and on the device of the model's own."""
    x = _like(x, args[0] if args else kwargs["hidden_states"])
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def _like(x: Tensor, own: Tensor) -> Tensor:
    """What goes in the place of the model's own."""
    return x.to(own.device, own.dtype)


class _Hooks:
    """One observer's hooks: where the places that it watches are in one architecture."""

    def __init__(self, model: Model, observer: Observer, shape: tuple[int, ...], stack: ExitStack) -> None:
        self.model, self.observer, self.shape, self.stack = model, observer, shape, stack
        self.facts = model.architecture

    def register(self) -> None:
        """A hook for everything that the observer's class overrides, and for nothing else."""
        facts, observer = self.facts, self.observer
        written = facts.attention if facts.attention_post_norm is None else facts.attention_post_norm
        watches = cache(observer.watches)  # found out once, not for every layer
        if facts.position_embedding is not None and watches("position_embedding"):
            self._after(self.model.hf.get_submodule(facts.position_embedding), self._position_embedding)
        for index, layer in enumerate(self.model.layers):
            if watches("layer_input"):
                self._before(layer, self._layer_input(index), with_kwargs=True)
            if watches("attention_write"):
                hook = self._output(index, observer.attention_write)
                self._after(layer.get_submodule(written), hook)
            if watches("mlp_input"):
                hook = self._input(index, observer.mlp_input)
                self._before(layer.get_submodule(facts.mlp), hook)
            if watches("mlp_write"):
                hook = self._output(index, observer.mlp_write)
                self._after(layer.get_submodule(facts.mlp_write), hook)
            if watches("norm_input"):
                self._norms(index, layer)
            if watches("query_input") or watches("key_input"):
                self._reread(index, layer)
        if watches("final_input"):
            hf: Any = self.model.hf
            final = (
                hf.get_output_embeddings() if facts.final_norm is None else hf.get_submodule(facts.final_norm)
            )
            hook = lambda _, args: observer.final_input(self._shown(args[0]))  # noqa: E731
            self._before(final, hook)

    def _before(self, module: nn.Module, hook: Callable[..., Any], with_kwargs: bool = False) -> None:
        handle = module.register_forward_pre_hook(in_this_thread(hook), with_kwargs=with_kwargs)
        self.stack.callback(handle.remove)

    def _after(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self.stack.callback(module.register_forward_hook(in_this_thread(hook)).remove)

    def _shown(self, x: Tensor) -> Tensor:
        """As observers see it: in float32 at least, where their own tensors are."""
        return x.to(self.model.device, self.model.dtype)

    def _as_tokens(self, x: Tensor) -> Tensor:
        """(batch, token, d_model) also where a block flattens its tokens (OPT)."""
        x = self._shown(x)
        return x if x.ndim == 3 else x.reshape(*self.shape, -1)

    def _position_embedding(self, _: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        changed = self.observer.position_embedding(self._shown(output).reshape(-1, *output.shape[-2:]))
        return None if changed is None else _like(changed.reshape(output.shape), output)

    def _layer_input(self, index: int) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            rotary = self._rotary(index, kwargs) if self.facts.rotates(index) else None
            x = args[0] if args else kwargs["hidden_states"]
            changed = self.observer.layer_input(index, self._shown(x), rotary)
            return None if changed is None else _with_input(args, kwargs, changed)

        return hook

    def _rotary(self, index: int, kwargs: dict[str, Any]) -> Rotary | None:
        """Rotary positions of a layer, from what its block is called with."""
        facts, tables = self.facts, kwargs.get("position_embeddings")
        if facts.own_rotary is not None:
            attention = self.model.layers[index].get_submodule(facts.attention)
            tables = facts.own_rotary(attention, kwargs["position_ids"])
        if tables is None:
            return None
        cos, sin = map(self._shown, tables)
        if facts.rotary_tables == "interleaved":  # each angle twice in a row: all angles twice over
            cos, sin = (torch.cat((table[..., 0::2],) * 2, dim=-1) for table in (cos, sin))
        return Rotary(cos, -sin if facts.rotary_backwards else sin)

    def _input(self, index: int, place: Callable[[int, Tensor], Tensor | None]) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> Any:
            changed = place(index, self._as_tokens(args[0]))
            return None if changed is None else (_like(changed.reshape(args[0].shape), args[0]), *args[1:])

        return hook

    def _output(self, index: int, place: Callable[[int, Tensor], Tensor | None]) -> Callable[..., Any]:
        times = self.facts.write_multiplier

        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            own: Tensor = output[0] if isinstance(output, tuple) else output
            written = self._as_tokens(own)
            changed = place(index, written if times == 1 else written * times)
            if changed is None:
                return None
            changed = changed.reshape(own.shape)
            changed = _like(changed if times == 1 else changed / times, own)
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return hook

    def _norms(self, index: int, layer: nn.Module) -> None:
        """The norms inside a block whose scales are frozen."""
        facts = self.facts
        places: dict[NormPlace, str | None] = {
            "attention_post_norm": facts.attention_post_norm,
            "mlp_norm": facts.mlp_norm,
            "mlp_post_norm": facts.mlp_post_norm,
        }
        if facts.query_key_norm is not None:
            places["query"], places["key"] = (f"{facts.attention}.{path}" for path in facts.query_key_norm)

        def hook_at(place: NormPlace) -> Callable[..., None]:
            def hook(norm: nn.Module, args: tuple[Any, ...]) -> None:
                if not is_rereading():
                    self.observer.norm_input(place, index, self._shown(args[0]), norm)

            return hook

        for place, path in places.items():
            if path is not None:
                self._before(layer.get_submodule(path), hook_at(place))

    def _reread(self, index: int, layer: nn.Module) -> None:
        """Queries or keys of another residual: the model's own norm and projections read it beside the real one."""
        path, attention = self.facts.attention_norm, layer.get_submodule(self.facts.attention)
        norm = None if path is None else layer.get_submodule(path)
        seen: list[Tensor] = []

        def look(_: nn.Module, args: tuple[Any, ...]) -> None:
            if not is_rereading():
                seen[:] = args[:1]

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = seen.pop() if norm is not None else args[0] if args else kwargs["hidden_states"]
            watch = watching.get()
            if watch is None:
                return
            sides = (self.observer.query_input, watch.queries), (self.observer.key_input, watch.keys)
            for side, (place, instead) in enumerate(sides):
                changed = place(index, self._shown(x))
                if changed is None:
                    continue
                changed = _like(changed, x)
                with rereading() as found:
                    read = changed if norm is None else norm(changed)
                    read_args, read_kwargs = _with_input(args, kwargs, read)
                    attention.forward(*read_args, **read_kwargs)
                used = found.key if side else found.query
                assert used is not None, "attention modules call the function that is registered"
                instead[index] = used

        if norm is not None:
            self._before(norm, look)
        self._before(attention, hook, with_kwargs=True)
