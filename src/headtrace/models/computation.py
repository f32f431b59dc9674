"""What a model computes besides its weights: the computing part of its config, and its buffers, as one hash.

The same weights compute something else with another rotary base, activation, epsilon or scaling, and
``weights_sha256`` does not see it. ``computation_sha256`` does. It is the same for one model wherever it was loaded
from (hub, folder, GGUF, saved again) and whatever dtype it was converted to, so it leaves out what cannot change a
forward pass (`NOT_COMPUTING`), fields that the config class does not have, and values that are the class's own
defaults, which another version of transformers may write or leave away.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from headtrace.models.model import Model

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
