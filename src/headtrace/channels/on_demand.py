"""The channels of a model, head by head as they are asked for, and kept on disk layer by layer.

A trace needs the channels of the heads that fire, not of all: a model of billions of parameters answers before the SVD
of all its heads would be done. Where many heads of a layer were asked for, the others follow in the background, and the
layer goes into the cache, under a hash of its own weights.

>>> import headtrace
>>> channels = headtrace.load("builtin").channels
>>> channels.at(2, 1).to_query.shape                                  # of one head
torch.Size([32, 32])
>>> channels.singular_values.shape                                    # of all: (layers, heads, channels)
torch.Size([3, 4, 32])
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from threading import RLock, Thread
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headtrace.cache import cache_folder
from headtrace.channels.svd import Bias, HeadChannels, as_channels, heads_svd
from headtrace.models.devices import exact_device, rounded
from headtrace.tables import html_table
from headtrace.vocabulary import head_name

if TYPE_CHECKING:
    from headtrace.models import Model

KEPT_FROM_NUMBERS = 1_000_000
"""Models with fewer numbers in their change-of-basis matrices are decomposed whole and anew: it takes no time."""
MANY = 0.5
"""When this share of a layer's heads was asked for, the others are made as well, in the background."""

Heads = int | Int[Tensor, "*n"]


class ModelChannels:
    """The channels of all heads of a model, each computed when it is asked for, in the model's dtype or another."""

    def __init__(self, model: Model, bias: Bias = "offset", dtype: torch.dtype | None = None) -> None:
        self.model: Model = model
        self.bias: Bias = bias
        self._weights = model.weights
        n_layers, n_heads, r = model.n_layers, model.n_heads, model.d_head
        shapes = {
            "singular_values": (n_layers, n_heads, r),
            "to_query": (n_layers, n_heads, r, r),
            "to_key": (n_layers, n_heads, r, r),
            "reconstruction_error": (n_layers, n_heads),
        }
        dtype = model.dtype if dtype is None else dtype
        device = exact_device(model.device) if dtype == torch.float64 else model.device
        tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        rank = torch.zeros(n_layers, n_heads, dtype=torch.long, device=device)
        self._found = HeadChannels(**tensors, rank=rank)
        self._known = [[False] * n_heads for _ in range(n_layers)]
        self._whole, self._looked, self._lock = False, set[int](), RLock()
        self._small = n_layers * n_heads * r**2 < KEPT_FROM_NUMBERS

    # -- asking ----------------------------------------------------------------------------------------------

    def at(self, layer: Heads, head: Heads) -> HeadChannels:
        """The channels of some heads, and of no others: tensors of layers and heads, or one of each."""
        if not self._whole:
            self._need(layer, head)
        return HeadChannels(**{name: tensor[layer, head] for name, tensor in self._found.tensors().items()})

    def layer(self, layer: int) -> HeadChannels:
        """The channels of all heads of one layer."""
        return self.at(layer, torch.arange(self.model.n_heads, device=self._found.rank.device))

    @property
    def all(self) -> HeadChannels:
        """The channels of every head."""
        if not self._whole:
            for layer in range(self.model.n_layers):
                self._make(layer, range(self.model.n_heads))
            self._whole = True
        return self._found

    @property
    def singular_values(self) -> Float[Tensor, "layer head channel"]:
        """Singular values of every head, falling."""
        return self.all.singular_values

    @property
    def to_query(self) -> Float[Tensor, "layer head d_head channel"]:
        """G_d: from a query to its channel coefficients."""
        return self.all.to_query

    @property
    def to_key(self) -> Float[Tensor, "layer head d_head channel"]:
        """G_s: from a key to its channel coefficients."""
        return self.all.to_key

    @property
    def rank(self) -> Int[Tensor, "layer head"]:
        """How many channels of each head are not rounding."""
        return self.all.rank

    @property
    def reconstruction_error(self) -> Float[Tensor, "layer head"]:
        """How far each head's query-key form is from the sum of its channels, relative to its size."""
        return self.all.reconstruction_error

    @property
    def deficient(self) -> list[tuple[int, ...]]:
        """Heads (layer, head) of rank below d_head; their attention has a remainder outside all channels."""
        return self.all.deficient

    @property
    def n_known(self) -> int:
        """How many heads were decomposed so far."""
        return sum(map(sum, self._known))

    def __repr__(self) -> str:
        layers, heads, channels = self._found.singular_values.shape
        return (
            f"ModelChannels({layers} layers x {heads} heads x {channels} channels, bias {self.bias!r}, {self.n_known} "
            "heads known)"
        )

    def _repr_html_(self) -> str:
        """By head, the first singular values and the rank: the heads of the largest ones first."""
        largest = self.singular_values[..., 0].flatten()
        rows = [self._html_row(int(i)) for i in largest.argsort(descending=True)[:10]]
        return html_table(("head", "rank", "singular values"), rows, title=repr(self))

    def _html_row(self, place: int) -> tuple[str, ...]:
        layer, head = divmod(place, self.singular_values.shape[1])
        values = ", ".join(f"{value:.2f}" for value in self.singular_values[layer, head, :5].tolist())
        return head_name(layer, head), str(int(self.rank[layer, head])), f"{values} ..."

    # -- making ----------------------------------------------------------------------------------------------

    def _need(self, layer: Heads, head: Heads) -> None:
        if self._small:
            self.all  # noqa: B018
            return
        layers, heads = torch.broadcast_tensors(torch.as_tensor(layer).cpu(), torch.as_tensor(head).cpu())
        wanted: dict[int, set[int]] = {}
        for l, h in zip(layers.flatten().tolist(), heads.flatten().tolist(), strict=True):
            if not self._known[l][h]:
                wanted.setdefault(l, set()).add(h)
        for l, mine in wanted.items():
            self._make(l, sorted(mine))
            if sum(self._known[l]) >= MANY * self.model.n_heads and not all(self._known[l]):
                Thread(
                    target=self._make, args=(l, range(self.model.n_heads)), name="headtrace-channels"
                ).start()

    @torch.inference_mode()
    def _make(self, layer: int, heads: range | list[int]) -> None:
        """Fill in some heads of a layer: from the cache if the layer is there, else those that are not known yet."""
        with self._lock:
            missing = [head for head in heads if not self._known[layer][head]]
            if not missing:
                return
            if not self._small and layer not in self._looked:
                self._looked.add(layer)
                kept = _kept(self._path(layer))
                if kept is not None:
                    self._fill(layer, list(range(self.model.n_heads)), kept)
                    return
            self._fill(layer, missing, as_channels(heads_svd(self.model, layer, missing, self.bias)))
            if not self._small and all(self._known[layer]):
                _keep(self._path(layer), {n: t[layer] for n, t in self._found.tensors().items()})

    def _fill(self, layer: int, heads: list[int], found: HeadChannels) -> None:
        for name, tensor in self._found.tensors().items():
            tensor[layer, heads] = rounded(getattr(found, name), like=tensor)
        for head in heads:
            self._known[layer][head] = True

    def _path(self, layer: int) -> Path:
        """Named by a hash of what the channels of the layer are made from."""
        digest, weights = hashlib.sha256(), self._weights
        made_from = [weights.W_Q[layer], weights.W_K[layer]]
        made_from += [weights.b_Q[layer], weights.b_K[layer]] if self.bias == "homogeneous" else []
        for tensor in made_from:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
        dtype = str(self._found.to_query.dtype).removeprefix("torch.")
        return cache_folder("channels") / f"{digest.hexdigest()}-{self.bias}-{dtype}-2.safetensors"


def model_channels(model: Model, bias: Bias = "offset", dtype: torch.dtype | None = None) -> ModelChannels:
    """The channels of a model in its dtype (or the one given); of layers that the cache has, from there."""
    return ModelChannels(model, bias, dtype)


def _kept(path: Path) -> HeadChannels | None:
    """Channels from the cache; None if they are not there or not what was written."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            written = (file.metadata() or {}).get("sha256")
    except (OSError, SafetensorError, ValueError):
        return None
    return HeadChannels(**tensors) if written == _digest(tensors) else None


def _keep(path: Path, found: Mapping[str, Tensor]) -> None:
    tensors = {name: tensor.contiguous().cpu() for name, tensor in found.items()}
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata={"sha256": _digest(tensors)})
        partial.replace(path)
    except (OSError, SafetensorError):  # a full disk: they are made again next time
        partial.unlink(missing_ok=True)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of what the tensors say, so that a damaged file is not taken for a whole one."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()
