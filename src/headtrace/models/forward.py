"""Run a model: the one place that does, ``forward``, one pass at a time.

A model has one lock: threads wait their turn. Inside, the model attends through headtrace's attention function, hooks
call the observers at the places they care about, layers outside a range hand their input on; afterwards, whatever
happened, the model is as it was: attention implementation, hooks, forward methods, training mode.

Where a model is spread over devices, observers see everything on ``model.device``, where recordings and what they put
in are kept; what they give back follows the layer that it goes into. Attention that they watch is computed there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headtrace.errors import HeadtraceError
from headtrace.models.attention import NAME, Watch, attend_by_hand, is_rereading, rereading, watching
from headtrace.models.devices import every_module, exact
from headtrace.models.observer import NormPlace, Observer, Rotary
from headtrace.models.weights import norm_bias, norm_eps, norm_gain, norm_scale

if TYPE_CHECKING:
    from headtrace.models.model import Model


class ModelLock:
    """Whose turn it is to use a model: a lock that knows its owner."""

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


def lock_of(hf: nn.Module) -> ModelLock:
    """The lock of a Hugging Face model: one, however many ``Model`` objects look at it."""
    with _locks_lock:
        return _locks.setdefault(hf, ModelLock())


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

    ``keep`` says at which positions of each prompt logits are wanted (None: everywhere). With ``layers`` only those
    run, the first of them from ``residual``: an intervention at layer 9 starts from the recorded residual there.
    With ``grad`` what observers put in can be differentiated through (the model's own parameters cannot).
    """
    model.refresh()
    options: dict[str, Any] = {"use_cache": False}
    if lengths is not None and len(set(lengths)) > 1:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        options["attention_mask"] = (positions < positions.new_tensor(lengths)[:, None]).long()
    with (
        lock_of(model.hf),
        torch.inference_mode(not grad),
        torch.set_grad_enabled(grad),
        ExitStack() as stack,
    ):
        _evaluate(model.hf, stack)
        if grad:
            _constant(model.hf, stack)
        if model.dtype == torch.float64:  # first, so that the hooks below see what it returns
            _full_precision_norms(model, stack)
        if layers is not None:
            _only(model, layers, residual, stack)
        _watch(model, observers, token_ids, stack)
        if keep is not None:
            _unembed_only(model, keep, stack)
        output: Any = model.hf(input_ids=token_ids, **options)
    return output.logits.to(model.device, model.dtype)


def sample(
    model: Model, token_ids: Int[Tensor, "batch token"], length: int, generator: torch.Generator
) -> Int[Tensor, "batch length"]:
    """Prompts of one length continued to ``length`` tokens in all, each token drawn as the model predicts it
    (temperature one). The generator lives on the CPU, so that the same seed draws alike on every device."""
    model.refresh()
    with lock_of(model.hf), torch.inference_mode(), ExitStack() as stack:
        _evaluate(model.hf, stack)
        _attend_here(model, (), stack)
        found, new, past = token_ids, token_ids, None
        while found.shape[1] < length:
            output: Any = model.hf(input_ids=new, past_key_values=past, use_cache=True, logits_to_keep=1)
            chances = exact(output.logits[:, -1]).softmax(-1).cpu()
            new = torch.multinomial(chances, 1, generator=generator).to(token_ids.device)
            found, past = torch.cat((found, new), dim=1), output.past_key_values
    return found


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
    model.refresh()
    found: list[int] = []
    new, past = token_ids, None
    with lock_of(model.hf), torch.inference_mode():
        for _ in range(n):
            with ExitStack() as stack:
                _evaluate(model.hf, stack)
                if model.dtype == torch.float64:
                    _full_precision_norms(model, stack)
                _watch(model, (*prompt_only, *observers) if past is None else observers, new, stack)
                output: Any = model.hf(input_ids=new, past_key_values=past, use_cache=True, logits_to_keep=1)
            new, past = output.logits[:, -1:].argmax(-1), output.past_key_values
            found.append(int(new))
    return found


def _watch(model: Model, observers: tuple[Observer, ...], token_ids: Tensor, stack: ExitStack) -> None:
    """Observers see the passes of the model until the stack is closed."""
    for observer in observers:
        _Places(model, observer, tuple(token_ids.shape), stack).hook()
    _attend_here(model, observers, stack)


def _evaluate(hf: nn.Module, stack: ExitStack) -> None:
    """Without dropout; each module's own mode comes back afterwards."""
    training = [module for module in every_module(hf) if module.training]
    if training:
        stack.callback(_set_training, training, True)
        _set_training(training, False)


def _constant(hf: nn.Module, stack: ExitStack) -> None:
    """Parameters are constants of this pass: nothing is kept for gradients that nobody asks for."""
    for parameter in [p for p in hf.parameters() if p.requires_grad and p.device.type != "meta"]:
        stack.callback(parameter.requires_grad_, True)
        parameter.requires_grad_(False)


def _set_training(modules: list[nn.Module], mode: bool) -> None:
    for module in modules:
        module.training = mode


def _attend_here(model: Model, observers: tuple[Observer, ...], stack: ExitStack) -> None:
    config: Any = model.config
    stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
    stack.callback(watching.reset, watching.set(Watch(observers, model.head_order, model.device)))
    own = model.architecture.own_attention
    config._attn_implementation = NAME if own is None or own.method is not None else "sdpa"
    if own is not None:
        attend_by_hand(model, own, stack)
    if model.dtype == torch.float64:  # grouped matrix products have no float64
        stack.callback(setattr, config, "_experts_implementation", config._experts_implementation)
        config._experts_implementation = "eager"
    if not config.return_dict:  # outputs by name, whatever the model's own setting
        stack.callback(setattr, config, "return_dict", config.return_dict)
        config.return_dict = True


def _unembed_only(model: Model, keep: Int[Tensor, "batch kept"], stack: ExitStack) -> None:
    """The unembedding sees the wanted positions only: over a whole vocabulary each one costs as much as a layer."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = args[0]
        where = keep.to(x.device)[..., None]
        return (x.gather(1, where.expand(-1, -1, x.shape[-1])), *args[1:])

    unembedding: Any = model.hf.get_output_embeddings()
    stack.callback(unembedding.register_forward_pre_hook(hook).remove)


def _full_precision_norms(model: Model, stack: ExitStack) -> None:
    """Let a float64 model's norms compute in float64.

    transformers rounds to float32 inside its own norms whatever the model's dtype, so that a float64 model would be
    exact to seven digits only; with this it is a float64 model throughout. PyTorch's LayerNorm does no such thing.
    """
    facts = model.architecture
    kind = type(model.hf.get_submodule(facts.final_norm))
    if issubclass(kind, nn.LayerNorm):
        return

    def hook(norm: nn.Module, args: tuple[Any, ...], _: Tensor) -> Tensor:
        x: Tensor = args[0]
        scale = norm_scale(x, norm_eps(norm), facts.norm)[..., None]
        normed = facts.centred(x) / scale * norm_gain(norm, facts, like=x)
        bias = norm_bias(norm)
        return normed if bias is None else normed + bias

    for module in model.hf.modules():
        if isinstance(module, kind):
            stack.callback(module.register_forward_hook(hook).remove)


def _hand_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _hand_on_first(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return hidden_states, None


def _only(model: Model, wanted: range, residual: Tensor | None, stack: ExitStack) -> None:
    """Layers outside the range hand their input on; the first one inside starts from ``residual``."""
    for index, layer in enumerate(model.layers):
        if index not in wanted:
            # What others put in its place (accelerate, where weights are brought in for each pass) comes back.
            own = {name: vars(layer)[name] for name in ("forward",) if name in vars(layer)}
            stack.callback(vars(layer).update, own)
            stack.callback(vars(layer).pop, "forward")
            layer.forward = _hand_on_first if model.architecture.blocks_return_tuples else _hand_on
    if residual is not None and len(wanted):

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return _with_input(args, kwargs, residual)

        first = model.layers[wanted[0]]
        stack.callback(first.register_forward_pre_hook(begin, with_kwargs=True, prepend=True).remove)


def _with_input(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> tuple[Any, dict[str, Any]]:
    """The arguments of a block with another residual, in the precision and on the device of the model's own."""
    x = _like(x, args[0] if args else kwargs["hidden_states"])
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def _like(x: Tensor, own: Tensor) -> Tensor:
    """What goes in the place of the model's own."""
    return x.to(own.device, own.dtype)


class _Places:
    """Where an observer's places are in one architecture."""

    def __init__(self, model: Model, observer: Observer, shape: tuple[int, ...], stack: ExitStack) -> None:
        self.model, self.observer, self.shape, self.stack = model, observer, shape, stack
        self.facts = model.architecture
        self.home, self.wide = model.device, model.dtype

    def hook(self) -> None:
        """A hook for everything that the observer's class overrides, and for nothing else."""
        facts = self.facts
        written = facts.attention if facts.attention_post_norm is None else facts.attention_post_norm
        wants = cache(self.observer.wants)  # asked once, not for every layer
        for index, layer in enumerate(self.model.layers):
            if wants("layer_input"):
                self._add(layer.register_forward_pre_hook(self._layer_input(index), with_kwargs=True))
            if wants("attention_write"):
                hook = self._output(index, self.observer.attention_write)
                self._add(layer.get_submodule(written).register_forward_hook(hook))
            if wants("mlp_input"):
                hook = self._input(index, self.observer.mlp_input)
                self._add(layer.get_submodule(facts.mlp).register_forward_pre_hook(hook))
            if wants("mlp_write"):
                hook = self._output(index, self.observer.mlp_write)
                self._add(layer.get_submodule(facts.mlp_write).register_forward_hook(hook))
            if wants("norm_input"):
                self._norms(index, layer)
            if wants("query_input") or wants("key_input"):
                self._reread(index, layer)
        if wants("final_input"):
            final = self.model.hf.get_submodule(facts.final_norm)
            self._add(
                final.register_forward_pre_hook(
                    lambda _, args: self.observer.final_input(self._shown(args[0]))
                )
            )

    def _add(self, handle: Any) -> None:
        self.stack.callback(handle.remove)

    def _layer_input(self, index: int) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            rotary = self._rotary(index, kwargs) if self.facts.turns(index) else None
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
        interleaved = facts.rotary_tables == "interleaved"
        cos, sin = (_table(self._shown(table), interleaved) for table in tables)
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

    def _shown(self, x: Tensor) -> Tensor:
        """As observers see it: in float32 at least, where their own tensors are."""
        return x.to(self.home, self.wide)

    def _as_tokens(self, x: Tensor) -> Tensor:
        """(batch, token, d_model) also where a block flattens its tokens (OPT)."""
        x = self._shown(x)
        return x if x.ndim == 3 else x.reshape(*self.shape, -1)

    def _norms(self, index: int, layer: nn.Module) -> None:
        facts = self.facts
        places: list[tuple[NormPlace, str | None]] = [
            ("attention_post_norm", facts.attention_post_norm),
            ("mlp_norm", facts.mlp_norm),
            ("mlp_post_norm", facts.mlp_post_norm),
        ]
        if facts.query_key_norm is not None:
            query, key = (f"{facts.attention}.{path}" for path in facts.query_key_norm)
            places.append(("query", query))
            places.append(("key", key))
        for place, path in places:
            if path is not None:
                self._add(layer.get_submodule(path).register_forward_pre_hook(self._norm(place, index)))

    def _norm(self, place: NormPlace, index: int) -> Callable[..., None]:
        def hook(norm: nn.Module, args: tuple[Any, ...]) -> None:
            if not is_rereading():
                self.observer.norm_input(place, index, self._shown(args[0]), norm)

        return hook

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
            wanted = (self.observer.query_input, watch.queries), (self.observer.key_input, watch.keys)
            for side, (place, instead) in enumerate(wanted):
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
            self._add(norm.register_forward_pre_hook(look))
        self._add(attention.register_forward_pre_hook(hook, with_kwargs=True))


def _table(table: Tensor, interleaved: bool) -> Tensor:
    """Cosines or sines with all angles twice over, from a table that has each twice in a row."""
    return torch.cat((table[..., 0::2],) * 2, dim=-1) if interleaved else table
