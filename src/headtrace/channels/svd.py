"""The SVD of every head's query-key form, never building a d x d matrix.

``Omega = W_Q W_K^T`` has rank at most r = d_head. With thin QR factors ``W_Q = Q_q T_q``, ``W_K = Q_k T_k``
the SVD of the small matrix ``T_q T_k^T`` is the SVD of Omega. Inside the head it is a change of basis,

    a = q @ to_query,   b = k @ to_key,   logit = scale * sum over channels of a_k b_k

for queries and keys as attention uses them (after bias, QK-norm and rotary positions), because
``to_query @ to_key^T`` is the identity.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> model.channels.singular_values.shape                              # (layers, heads, channels)
torch.Size([3, 4, 32])
>>> a, b = model.channels.to_query[0, 0], model.channels.to_key[0, 0]
>>> torch.allclose(a @ b.T, torch.eye(32), atol=1e-3)
True

A trace needs the channels of the heads that fire, not of all: a large model answers before the SVD of all its heads
would be done. `ModelChannels` decomposes heads as they are needed. When half of a layer's heads have been, the others
follow in the background, and the layer is cached on disk under a hash of its own weights.

>>> model.channels.at(2, 1).to_query.shape                            # of one head
torch.Size([32, 32])
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from threading import RLock, Thread
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headtrace.errors import IdentityError, InputError
from headtrace.models.devices import exact, exact_device, rounded
from headtrace.tables import html_table
from headtrace.vocabulary import head_name
from headtrace.writing import cache_folder

if TYPE_CHECKING:
    import polars as pl

    from headtrace.models import Model
    from headtrace.models.weights import FoldedWeights

Bias = Literal["offset", "homogeneous"]

RANK_TOLERANCE = 1e-10
"""Singular values below this share of the largest count as zero. float32 weights carry seven digits, and a
product of two keeps true small values far above this; exact zeros (pruned or repeated columns) come out near
1e-16."""

RECONSTRUCTION_TOLERANCE = 1e-10
"""Relative error allowed for a head put together again from its channels, in float64."""

CHOLESKY_CONDITION = 3e3
"""Up to this condition number (Frobenius, an upper bound) the Cholesky route to T is exact to 1e-9."""


@dataclass(frozen=True, eq=False)
class HeadChannels:
    """The channels of some heads: of all of a model, of one layer, of those that fire."""

    singular_values: Float[Tensor, "*heads channel"]
    to_query: Float[Tensor, "*heads d_head channel"]
    """G_d: from a query to its channel coefficients."""
    to_key: Float[Tensor, "*heads d_head channel"]
    """G_s: from a key to its channel coefficients."""
    rank: Int[Tensor, "*heads"]
    reconstruction_error: Float[Tensor, "*heads"]

    @property
    def deficient(self) -> list[tuple[int, ...]]:
        """Heads (layer, head) of rank below d_head; their attention has a remainder outside all channels."""
        return [tuple(place) for place in (self.rank < self.singular_values.shape[-1]).nonzero().tolist()]

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, eq=False)
class HeadSVD:
    """Some heads' ``W_Q[h] W_K[h]^T = U diag(S) V^T``, in float64; U and V are made when asked for."""

    S: Float[Tensor, "head channel"]
    to_query: Float[Tensor, "head d_head channel"]
    to_key: Float[Tensor, "head d_head channel"]
    error: Float[Tensor, " head"]
    """Relative error of the head put together again from its channels."""
    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "kv_head d_model d_head"]
    left: Float[Tensor, "head d_head channel"]

    @property
    def U(self) -> Float[Tensor, "head d_model channel"]:
        """Left singular vectors: ``W_Q T_q^-1 left``."""
        return self.W_Q @ self.left

    @property
    def V(self) -> Float[Tensor, "head d_model channel"]:
        """Right singular vectors: ``W_K T_k^-1 right``."""
        return _per_query_head(self.W_K, len(self.W_Q)) @ self.to_key


def svd_heads(
    W_Q: Float[Tensor, "head d_model d_head"], W_K: Float[Tensor, "kv_head d_model d_head"]
) -> HeadSVD:
    """SVD of ``W_Q W_K^T`` for every query head, by thin QR and small SVDs in float64; fixed signs."""
    queries, keys = exact(W_Q), exact(W_K)
    T_q, inverse_q = thin_triangle(queries)
    T_k, inverse_k = (_per_query_head(t, len(queries)) for t in thin_triangle(keys))
    core = T_q @ T_k.mT
    left, S, right_h = torch.linalg.svd(core)
    norm = torch.linalg.matrix_norm(core).clamp_min(torch.finfo(torch.float64).tiny)
    error = torch.linalg.matrix_norm(core - (left * S[:, None]) @ right_h) / norm
    left = inverse_q @ left
    # (u, v) and (-u, -v) are the same channel: the largest entry of u is made positive.
    lowest, highest = torch.aminmax(queries @ left, dim=1, keepdim=True)
    signs = torch.where(highest + lowest >= 0, 1.0, -1.0).to(S.dtype)
    right = right_h.mT * signs
    # T_q^-1 left diag(S) = T_k^T right: no inverse, so a singular T_q does no harm; T_k needs its own.
    return HeadSVD(
        S=S,
        to_query=T_k.mT @ right,
        to_key=inverse_k @ right,
        error=error,
        W_Q=queries,
        W_K=keys,
        left=left * signs,
    )


def _per_query_head(x: Tensor, n_heads: int) -> Tensor:
    """Grouped queries: the row of key-value head ``h // group`` for every query head h."""
    return x if len(x) == n_heads else x.repeat_interleave(n_heads // len(x), dim=0)


def thin_triangle(
    W: Float[Tensor, "head d r"],
) -> tuple[Float[Tensor, "head r r"], Float[Tensor, "head r r"]]:
    """The triangle T of a thin QR, ``W = Q T``, and its inverse (pseudo-inverse where W is rank-deficient).

    T is the Cholesky factor of ``W^T W``, which costs one product and is exact to about 1e-16 times the
    squared condition number; matrices for which that would be worse than 1e-9 go through Householder QR.
    """
    T, failed = torch.linalg.cholesky_ex(W.mT @ W, upper=True)
    identity = torch.eye(W.shape[-1], dtype=W.dtype, device=W.device).expand_as(T)
    inverse = torch.linalg.solve_triangular(T, identity, upper=True)
    condition = torch.linalg.matrix_norm(T) * torch.linalg.matrix_norm(inverse)
    for head in ((failed != 0) | ~(condition < CHOLESKY_CONDITION)).nonzero()[:, 0].tolist():
        R = torch.linalg.qr(W[head], mode="r").R
        T[head] = 0
        T[head, : len(R)] = R  # fewer rows where a head is wider than the residual
        singular = torch.linalg.svdvals(T[head])
        deficient = bool(singular[-1] <= RANK_TOLERANCE * singular[0])
        inverse[head] = (
            torch.linalg.pinv(T[head], rtol=RANK_TOLERANCE)
            if deficient
            else torch.linalg.solve_triangular(T[head], identity[head], upper=True)
        )
    return T, inverse


def condition_numbers(
    model: Model,
) -> tuple[Float[Tensor, "layer head"], Float[Tensor, "layer kv_head"]]:
    """Condition numbers of every W_Q and W_K (norms folded in); infinite where rank-deficient."""
    return _condition(model.weights.W_Q), _condition(model.weights.W_K)


def _condition(W: Float[Tensor, "layer head d_model d_head"]) -> Float[Tensor, "layer head"]:
    singular = torch.linalg.svdvals(torch.stack([thin_triangle(exact(layer))[0] for layer in W]))
    largest, smallest = singular[..., 0], singular[..., -1]
    return torch.where(smallest <= RANK_TOLERANCE * largest, torch.inf, largest / smallest)


def _check(svd: HeadSVD, layer: int, heads: Sequence[int]) -> None:
    worst = int(svd.error.argmax())
    if not float(svd.error[worst]) <= RECONSTRUCTION_TOLERANCE:
        raise IdentityError(
            f"The channels of {head_name(layer, heads[worst])} do not reproduce its query-key form: relative error "
            f"{float(svd.error[worst]):.1e} (allowed {RECONSTRUCTION_TOLERANCE:.0e}). Are the weights finite?"
        )


def _with_bias(W: Tensor, b: Tensor) -> Tensor:
    """Homogeneous coordinates: the bias as one more input dimension."""
    return torch.cat((W, b[:, None]), dim=1)


def key_weights(
    weights: FoldedWeights, layer: int, bias: Bias = "offset"
) -> Float[Tensor, "kv_head d_model d_head"]:
    """W_K of one layer's key-value heads; in homogeneous coordinates with the bias as one more row."""
    W_K, b_K = weights.W_K[layer], weights.b_K[layer]
    return _with_bias(W_K, b_K) if bias == "homogeneous" else W_K


def heads_svd(
    model: Model,
    layer: int,
    heads: Sequence[int],
    bias: Bias = "offset",
    weights: FoldedWeights | None = None,
) -> HeadSVD:
    """Singular vectors and values of some heads of one layer (``U`` and ``V`` are not kept for the whole model).

    ``weights`` are the model's, where they are at hand: asking the model for them may wait for its lock.
    """
    weights = model.weights if weights is None else weights
    queries, chosen = weights.W_Q[layer], torch.tensor(list(heads), device=model.device)
    if bias == "homogeneous":
        if model.architecture.rotary:
            raise InputError(
                f"bias='homogeneous' needs a model without rotary positions; {model.architecture.name} has "
                "them. Use bias='offset'."
            )
        queries = _with_bias(queries, weights.b_Q[layer])
    keys = key_weights(weights, layer, bias)
    if len(heads) < model.n_heads:
        queries, keys = queries[chosen], keys[chosen // weights.group]
    svd = svd_heads(queries, keys)
    _check(svd, layer, heads)
    return svd


def layer_svd(model: Model, layer: int, bias: Bias = "offset") -> HeadSVD:
    """Singular vectors and values of one layer's heads."""
    return heads_svd(model, layer, range(model.n_heads), bias)


def as_channels(svd: HeadSVD) -> HeadChannels:
    """What is kept of some heads' SVD."""
    rank = (RANK_TOLERANCE * svd.S[..., :1] < svd.S).sum(dim=-1)
    return HeadChannels(svd.S, svd.to_query, svd.to_key, rank, svd.error)


@torch.inference_mode()
def decompose_model(model: Model, bias: Bias = "offset") -> HeadChannels:
    """All heads of a model, computed anew, in float64."""
    layers = [as_channels(layer_svd(model, layer, bias)).tensors() for layer in range(model.n_layers)]
    return HeadChannels(**{name: torch.stack([layer[name] for layer in layers]) for name in layers[0]})


# -- on demand, and kept on disk -----------------------------------------------------------------------------


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

    def frame(self) -> pl.DataFrame:
        """A row per head and channel: layer, head, channel, singular_value, and the rank of its head."""
        import polars as pl

        values = self.singular_values
        places = torch.cartesian_prod(*(torch.arange(n) for n in values.shape)).T.tolist()
        rank = self.rank[..., None].expand(values.shape).flatten().tolist()
        columns = dict(zip(("layer", "head", "channel"), places, strict=True))
        return pl.DataFrame({**columns, "singular_value": values.flatten().tolist(), "rank": rank})

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
            # Nothing here may wait for the model: whoever holds its lock may be waiting for these channels.
            made = heads_svd(self.model, layer, missing, self.bias, self._weights)
            self._fill(layer, missing, as_channels(made))
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
    """The channels of a model in its dtype (or the one given), read from the cache where it has the layer."""
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
