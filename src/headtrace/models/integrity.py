"""Whether a model is what it should be, and still what it was: parameters, device, changes of weights, their hash.

What is derived from the weights (folded weights, channels, their hash) is kept, so a change must be noticed, in a
fraction of a millisecond. PyTorch counts edits in place, also under ``torch.no_grad()`` and by optimisers; modules and
parameters that are replaced, moved or converted are other objects or at other addresses. ``parameter.data``, NumPy
views and fused optimisers bypass the count: a sample of each parameter's numbers shows edits of whole parameters and of
most blocks of them (on the CPU), not those of a few numbers. After such an edit, call ``model.invalidate()``.

Besides its weights, a model computes with part of its config and with its buffers. The same weights compute something
else with another rotary base, activation, epsilon or scaling, and ``weights_sha256`` does not see it.
``computation_sha256`` does. It is the same for one model wherever it was loaded from (hub, folder, GGUF, saved again)
and whatever dtype it was converted to, so it leaves out what cannot change a forward pass (`NOT_COMPUTING`), fields
that the config class does not have, and values that are the class's own defaults, which another version of transformers
may write or leave away.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils import logging as transformers_logging

from headtrace.errors import IdentityError, InputError, UnsupportedModelError
from headtrace.models.devices import (
    DTYPES,
    HALF,
    compute_dtype,
    dtype_name,
    is_spread,
    own_parameters,
    set_aside,
    set_aside_in_memory,
    values_of,
)

if TYPE_CHECKING:
    from headtrace.models.model import Model
    from headtrace.models.recording import Recording


# -- parameters ----------------------------------------------------------------------------------------------


@torch.no_grad()
def check_parameters(hf: nn.Module) -> None:
    """InputError that names the first parameter with a wrong type or device, or with a number that is not finite."""
    first: Tensor | None = None
    spread = is_spread(hf)
    for name, parameter in hf.named_parameters():
        first = parameter if first is None else first
        values, dtype = values_of(hf, name, parameter), dtype_name(parameter.dtype)
        if parameter.dtype not in DTYPES:
            raise InputError(
                f"The parameter {name!r} is in {dtype}; expected {', '.join(map(dtype_name, DTYPES))}. "
                "Call model.float() first, or let headtrace.load read it with dtype='float32'."
            )
        if parameter.dtype != first.dtype or (parameter.device != first.device and not spread):
            raise InputError(
                f"The parameter {name!r} is in {dtype} on {str(parameter.device)!r}, others are in "
                f"{dtype_name(first.dtype)} on {str(first.device)!r}. Convert or move the whole model first: "
                "model.to(...)."
            )
        # A sum is finite only if all its terms are, and costs a tenth of looking at each; it may overflow.
        if bool(torch.isfinite(values.sum())):
            continue
        wrong = ~torch.isfinite(values)
        if bool(wrong.any()):
            raise InputError(
                f"The parameter {name!r} is not finite: {int(wrong.sum())} of {values.numel()} numbers are NaN or "
                f"infinite, the first at {tuple(wrong.nonzero()[0].tolist())}. Nothing that such a model computes can "
                "be trusted: fetch or save it again."
            )


ADAPTERS = ("peft.", "adapters.", "loralib.")
"""Packages whose modules compute with weights beside those that headtrace reads."""


def check_adapters(hf: nn.Module) -> None:
    """UnsupportedModelError that names an adapter: what it adds is in no weight that is folded; it must be merged."""
    for name, module in hf.named_modules():
        if any(kind.__module__.startswith(ADAPTERS) for kind in type(module).__mro__):
            what, kind = f"The module {name!r}" if name else "The model", type(module)
            raise UnsupportedModelError(
                f"{what} is an adapter ({kind.__module__}.{kind.__name__}), whose weights stand beside the model's own "
                "and are not decomposed. Merge them first: PeftModel(...).merge_and_unload() gives a plain model with "
                "the same outputs, which headtrace.load takes."
            )


def check_surroundings(device: torch.device) -> None:
    """InputError if PyTorch is set to compute something else than it is told: in half precision, or nothing at all."""
    known = torch.amp.autocast_mode.is_autocast_available(device.type)  # not on every kind of device
    if known and torch.is_autocast_enabled(device.type):
        raise InputError(
            f"torch.autocast is on for {device.type!r}: it rounds every product to half precision, and nothing would "
            "add up. Call headtrace outside of it; to trace a model in half precision, load it so: "
            "headtrace.load(..., dtype='bfloat16')."
        )
    if torch.get_default_device().type == "meta":
        raise InputError(
            "The default device of PyTorch is 'meta', where tensors have no numbers, so nothing can be computed. Call "
            "torch.set_default_device('cpu') first, or leave the `with torch.device('meta')` block."
        )


# -- devices -------------------------------------------------------------------------------------------------

SIZE = 24
"""Rows and columns of the matrices that a device is tried with."""


def _written_by_index(x: Tensor, y: Tensor) -> Tensor:
    rows = torch.arange(0, SIZE, 3, device=x.device)
    found = torch.zeros_like(x)
    found[rows, rows.flip(0)] = y[rows, 1]
    found = found.index_add(0, rows, x[rows]).scatter(1, y.argsort(-1)[:, :2], 0.5)
    return found.scatter_add_(1, x.argsort(-1), y)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matrix products": lambda x, y: x @ y + x.mT @ y.mT + functional.linear(x, y, y[0]),
    "batches of matrix products": lambda x, y: x.reshape(4, -1, SIZE) @ y,
    "products of matrices and vectors": lambda x, y: x @ y[0] + y @ x[0] * (x[1] @ y[1]),
    "sums of products (einsum)": lambda x, y: torch.einsum(
        "bhtr,hrd->btd", x.reshape(2, 3, 4, SIZE), y.reshape(3, SIZE, 8)
    ),
    "softmax": lambda x, _: (8 * x).masked_fill(torch.ones_like(x).triu(1) > 0, -torch.inf).softmax(-1),
    "log-sum-exp": lambda x, _: (8 * x).masked_fill(torch.ones_like(x).triu(1) > 0, -torch.inf).logsumexp(-1),
    "norms": lambda x, y: torch.stack((x.var(-1, unbiased=False).sqrt(), y.square().mean(-1).rsqrt())),
    "layer norm": lambda x, y: functional.layer_norm(x, (SIZE,), y[0], y[1]),
    "arithmetic": lambda x, y: (
        (x - y).abs() / y.abs().clamp_min(1.0) + torch.addcmul(x, x, y) * (2 + y.square()).reciprocal()
    ),
    "sums": lambda x, y: torch.stack(
        (x.sum(-1), y.mT.sum(-1), x.amax(0), y.amin(0), x.maximum(y)[0], y.norm(dim=0))
    ),
    "cumulative sums": lambda x, y: x.cumsum(-1) + y.mT.cumsum(0),
    "activations": lambda x, y: torch.cat(
        (x.tanh(), functional.silu(y), functional.gelu(x), y.relu(), x.exp())
    ),
    "rotations": lambda x, y: torch.cat((-x[:, 12:], x[:, :12]), dim=-1) * y.cos() + x * y.sin(),
    "embeddings": lambda x, y: functional.embedding(x.argsort(-1)[:2], y),
    "choosing by index": lambda x, y: (
        x.gather(1, y.argsort(-1)) + x[y[0].argsort(), y[1].argsort()] + x.index_select(0, y[2].argsort())
    ),
    "writing by index": _written_by_index,
    "changes in place": lambda x, y: x.clone().mT.add_(y).mul_(2).sub_(x).div_(4).masked_fill_(y > 1, 0.0),
    "sorting": lambda x, y: torch.cat(
        (x.sort(dim=-1, descending=True, stable=True).values, y.topk(20).values), dim=-1
    ),
    "conditions": lambda x, y: torch.where(x > y, x, y).masked_fill(y.isnan() | (x < -2), 0.0),
}
"""What is tried on a device, by the name in the message."""


def check_devices(own: torch.dtype, devices: Iterable[torch.device]) -> None:
    """Compare what a model's devices compute with the CPU, once in a process; IdentityError names what is wrong.

    The identities of a recording compare a device with itself: a softmax that is wrong in the same way each time would
    pass them.
    """
    for device in dict.fromkeys(device for device in devices if device.type != "cpu"):
        for dtype in dict.fromkeys((own, compute_dtype(own))):
            wrong = _first_wrong(device, dtype)
            if wrong is not None:
                raise IdentityError(
                    f"The device {str(device)!r} computes {wrong[0]} wrongly in {dtype_name(dtype)}: relative error "
                    f"{wrong[1]:.1e} against the host (allowed {wrong[2]:.0e}), so nothing that a model shows there "
                    "can be trusted. Use device='cpu', another version of PyTorch or of the driver, or, if products "
                    "were made less exact on purpose, torch.set_float32_matmul_precision('highest')."
                )


@cache
def _first_wrong(device: torch.device, dtype: torch.dtype) -> tuple[str, float, float] | None:
    """The first operation with too large an error: its name, the error and what is allowed."""
    # In half precision the rounding of the result (sums are made in float32), else of each term of a sum.
    allowed = (8 if dtype in HALF else 4 * SIZE) * torch.finfo(dtype).eps
    # Numbers that the dtype has, so that a difference was computed, not rounded before.
    drawn = torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        there = drawn.to(device)
        for name, operation in OPERATIONS.items():
            expected, found = operation(*drawn.double()), operation(*there).cpu().double()
            error = float((found - expected).abs().max() / expected.abs().max())
            if not error <= allowed:
                return name, error, allowed
    return None


# -- changes of weights --------------------------------------------------------------------------------------

SAMPLES = 32
"""Numbers that are compared per parameter."""
_edits = attrgetter("_version")


class WeightsVersion:
    """Stands for one state of a model's weights, without holding them: another object after every change."""

    weights_sha256: str | None = None
    """Their hash, once it was computed."""


class Watcher:
    """What a model's weights look like at one moment, to be compared with what they look like later."""

    def __init__(self, hf: nn.Module) -> None:
        # Dictionaries of the modules themselves: they show what is added, replaced or taken away.
        # Parameters of modules whose weights were set aside come and go with every pass: those are watched instead.
        self._aside = [module for module in hf.modules() if set_aside(module) is not None]
        ignored = {id(vars(module)["_parameters"]) for module in self._aside}
        self._dicts: list[dict[str, Any]] = [
            own
            for module in hf.modules()
            for own in (vars(module)["_modules"], vars(module)["_parameters"])
            if id(own) not in ignored
        ]
        # Buffers compute, too (rotary frequencies); those that a longer prompt makes anew change with every pass.
        self._dicts += [
            vars(module)["_buffers"]
            for module in hf.modules()
            if vars(module)["_buffers"] and not changing_buffers(module)
        ]
        self._parts = list(self._now())
        self._parameters: list[Tensor] = list(
            {id(part): part for part in self._parts if isinstance(part, Tensor)}.values()
        )
        # Parameters made in inference mode have no count of edits.
        self._counted = [p for p in self._parameters if not p.is_inference()]
        # They share memory with the parameters, whose addresses cannot be given to others as long as these are held.
        self._samples = [_sample(p) for p in self._parameters if p.device.type == "cpu"]
        self._seen = self._look()

    def unchanged(self) -> bool:
        """Whether nothing that can be seen has changed."""
        now = list(self._now())
        return len(now) == len(self._parts) and all(map(is_, now, self._parts)) and self._look() == self._seen

    def _now(self) -> Iterator[Any]:
        yield from chain.from_iterable(map(dict.values, self._dicts))
        yield from chain.from_iterable(set_aside_in_memory(module).values() for module in self._aside)

    def _look(self) -> tuple[list[int], list[int], bytes]:
        addresses = list(map(Tensor.data_ptr, self._parameters))
        return list(map(_edits, self._counted)), addresses, b"".join(map(np.ndarray.tobytes, self._samples))


def _sample(parameter: Tensor) -> np.ndarray:
    """Some of a parameter's numbers, spread over rows and columns alike, as a view."""
    held = parameter.detach()
    # NumPy knows no bfloat16: its bits will do.
    values = (held.view(torch.int16) if held.dtype == torch.bfloat16 else held).numpy()
    if not values.flags.c_contiguous:
        return values[tuple(slice(None, None, max(1, size // 6)) for size in values.shape)]
    row = values.shape[-1] if values.ndim > 1 else 1
    # Each step goes some rows down and a golden section of a row across, so that no column is always the one.
    step = values.size // SAMPLES // row * row + (round(0.618 * row) if row > 1 else 0)
    return values.reshape(-1)[:: max(1, step)][: 2 * SAMPLES]


def require_same_weights(recording: Recording) -> None:
    """A recording belongs to the weights it was made with: with others, nothing would add up."""
    if recording.weights_version is not recording.model.refresh():
        raise InputError(
            f"The weights of {recording.model.name!r} were changed after this recording was made, so the two do not "
            "belong together. Record again: model.record(prompt)."
        )


@torch.no_grad()
def weights_sha256(hf: nn.Module) -> str:
    """A hash of names, shapes and float32 values of all parameters: the same whatever dtype they are kept in."""
    digest = hashlib.sha256()
    for name, parameter in sorted(own_parameters(hf)):
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        # Some numbers at a time, so that no second copy of a large matrix is made.
        for block in values_of(hf, name, parameter).detach().contiguous().flatten().split(1 << 24):
            digest.update(block.float().cpu().numpy().data)
    return digest.hexdigest()


NOT_COMPUTING = {
    # names, versions and what the module is made as
    *(
        "name_or_path",
        "transformers_version",
        "architectures",
        "auto_map",
        "tokenizer_class",
        "dtype",
        "torch_dtype",
    ),
    *("quantization_config", "is_decoder", "is_encoder_decoder", "cross_attention_hidden_size"),
    # what is returned, and how it is computed
    *("return_dict", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("gradient_checkpointing", "chunk_size_feed_forward", "pretraining_tp"),
    # training and classification
    *("router_aux_loss_coef", "router_jitter_noise", "id2label", "label2id", "num_labels", "problem_type"),
    *("task_specific_params", "finetuning_task", "keys_to_ignore_at_inference"),
    # generation
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix"),
    # what the weights themselves say
    *("vocab_size", "tie_word_embeddings"),
}
"""Fields of a config that cannot change what a forward pass computes from given weights."""
_NOT_COMPUTING_PARTS = ("drop", "initializer", "summary_")
"""Parts of the names of such fields: dropout (off while headtrace runs a model), initial weights, classifiers."""


@runtime_checkable
class Hashed(Protocol):
    """Whatever names a model by its hashes: parts of files, and a model itself."""

    @property
    def weights_sha256(self) -> str | None: ...

    @property
    def computation_sha256(self) -> str | None: ...


def difference(kept: Hashed, model: Hashed) -> str | None:
    """In what the model that a file was made with is another one than this, in words; None if it is not.

    A file from before headtrace 0.3 has no hash of the computation: then only the weights are compared
    (`NOT_COMPARED` is what is said of it then).
    """
    if kept.weights_sha256 is not None and kept.weights_sha256 != model.weights_sha256:
        return f"other weights ({kept.weights_sha256[:12]}... there, {str(model.weights_sha256)[:12]}... in this one)"
    if kept.computation_sha256 is not None and kept.computation_sha256 != model.computation_sha256:
        return (
            "the same weights, but another computation: its config (rotary base, activation, epsilon, scaling, windows "
            f"...) or its buffers differ ({kept.computation_sha256[:12]}... there, "
            f"{str(model.computation_sha256)[:12]}... in this one)"
        )
    return None


NOT_COMPARED = (
    "whether the model's config (rotary base, activation, epsilon, scaling ...) is the one that was used: the file is "
    "from a version that kept a hash of the weights alone"
)
"""What cannot be said of a file without a hash of the computation."""


def warn_if_not_compared(what: str, kept: Hashed) -> None:
    """Say of a file of an earlier version what could not be compared."""
    if kept.computation_sha256 is None:
        warnings.warn(f"{what} does not say {NOT_COMPARED}.", stacklevel=3)


def computation_sha256(model: Model) -> str:
    """A hash of the computing part of a model's config, and of its buffers."""
    told = json.dumps(computing_config(model.config), sort_keys=True, separators=(",", ":"), default=str)
    buffers = model.cached("buffers_sha256", lambda: _buffers_sha256(model.hf))
    return hashlib.sha256(f"{told}\n{buffers}".encode()).hexdigest()


def computing_config(config: Any) -> dict[str, Any]:
    """The fields of a config that say how the weights are used, where they are not the defaults of their class.

    >>> from transformers import LlamaConfig
    >>> computing_config(LlamaConfig(rms_norm_eps=1e-5, bos_token_id=7, attention_dropout=0.5, is_llama_config=True))
    {'model_type': 'llama', 'rms_norm_eps': 1e-05}
    """
    told, usual = config.to_dict(), {**_UNDECLARED, **_defaults(type(config))}
    if usual["head_dim"] is None and told.get("head_dim") == config.hidden_size // config.num_attention_heads:
        told.pop("head_dim")
    found = {
        name: _canonical(told[name])
        for name in sorted(usual)
        if name in told and _computes(name) and _canonical(told[name]) != _canonical(usual[name])
    }
    return {"model_type": config.model_type, **found}


_UNDECLARED: dict[str, Any] = {"head_dim": None, "partial_rotary_factor": None, "sliding_window": None}
"""Fields that modules read although not every config class has them."""


@cache
def _defaults(kind: type) -> dict[str, Any]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # some defaults do not suit each other, and say so
    try:
        return kind().to_dict()
    finally:
        transformers_logging.set_verbosity(verbosity)


def _computes(name: str) -> bool:
    if name.startswith("_") or name in NOT_COMPUTING or name == "model_type":
        return False
    return not any(part in name for part in _NOT_COMPUTING_PARTS)


def _canonical(value: Any) -> Any:
    """Equal numbers in the same form, and nothing where a mapping says nothing."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items() if item is not None}
    return [_canonical(item) for item in value] if isinstance(value, (list, tuple)) else value


@torch.no_grad()
def _buffers_sha256(hf: nn.Module) -> str:
    """A hash of all buffers that the config does not give: saved ones, scales, and tables that somebody exchanged."""
    digest = hashlib.sha256()
    for name, values in sorted(_own_buffers(hf), key=lambda each: each[0]):
        digest.update(f"{name} {tuple(values.shape)}\n".encode())
        digest.update(values.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def _own_buffers(hf: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers of real numbers as float32. Masks and numbers of positions are the same in every model.

    What is not saved is made from the config, which is hashed already, and another machine or dtype rounds it
    otherwise: rotary frequencies are compared with what the config gives, single numbers are rounded to bfloat16.
    """
    for path, module in hf.named_modules():
        held = vars(module)["_buffers"]
        if not held:
            continue
        saved, changing = set(module.state_dict()), changing_buffers(module)
        for name, buffer in held.items():
            if (
                not isinstance(buffer, Tensor)
                or not buffer.is_floating_point()
                or buffer.device.type == "meta"
            ):
                continue
            if buffer.numel() == 1:
                yield f"{path}.{name}", buffer.detach().to(torch.bfloat16).float()
            elif name in saved or (
                "inv_freq" in name and name not in changing and not _as_made(module, name, buffer)
            ):
                yield f"{path}.{name}", buffer.detach().float()


def changing_buffers(module: nn.Module) -> set[str]:
    """Rotary frequencies that are made anew for longer prompts: what is in use depends on the last prompt."""
    kinds: Any = getattr(module, "rope_type", "")
    if not any(kind in str(kinds) for kind in ("dynamic", "longrope")):
        return set()
    return {
        name for name in vars(module)["_buffers"] if name.endswith("inv_freq") and "original_" not in name
    }


def _as_made(module: nn.Module, name: str, buffer: Tensor) -> bool:
    """Whether rotary frequencies are those that the module's own config gives, to the rounding of half precision."""
    kind: Any = type(module)
    try:
        made: Tensor = getattr(kind(module.config), name)
    except (AttributeError, TypeError, KeyError):
        return False
    found, rounding = buffer.detach().float().cpu(), 2.0**-7
    return found.shape == made.shape and torch.allclose(found, made.float().cpu(), rtol=rounding, atol=0)
