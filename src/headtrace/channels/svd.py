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
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headtrace.cache import cache_folder
from headtrace.errors import IdentityError, InputError
from headtrace.tables import html_table
from headtrace.vocabulary import head_name

if TYPE_CHECKING:
    from headtrace.models import Model

Bias = Literal["offset", "homogeneous"]

RANK_TOLERANCE = 1e-10
"""Singular values below this share of the largest count as zero. float32 weights carry seven digits, and a
product of two keeps true small values far above this; exact zeros (pruned or repeated columns) come out near
1e-16."""

RECONSTRUCTION_TOLERANCE = 1e-10
"""Relative error allowed for a head put together again from its channels, in float64."""

CHOLESKY_CONDITION = 3e3
"""Up to this condition number (Frobenius, an upper bound) the Cholesky route to T is exact to 1e-9."""

CACHE_FROM_NUMBERS = 1_000_000
"""Models with fewer numbers in their change-of-basis matrices are decomposed anew: it takes no time."""


@dataclass(frozen=True, eq=False, repr=False)
class ModelChannels:
    """The channels of all heads of a model."""

    singular_values: Float[Tensor, "layer head channel"]
    to_query: Float[Tensor, "layer head d_head channel"]
    """G_d: from a query to its channel coefficients."""
    to_key: Float[Tensor, "layer head d_head channel"]
    """G_s: from a key to its channel coefficients."""
    rank: Int[Tensor, "layer head"]
    reconstruction_error: Float[Tensor, "layer head"]
    bias: Bias = "offset"

    @property
    def deficient(self) -> list[tuple[int, int]]:
        """Heads (layer, head) of rank below d_head; their attention has a remainder outside all channels."""
        return [(int(l), int(h)) for l, h in (self.rank < self.singular_values.shape[-1]).nonzero()]

    def __repr__(self) -> str:
        layers, heads, channels = self.singular_values.shape
        return (
            f"ModelChannels({layers} layers x {heads} heads x {channels} channels, bias {self.bias!r}, "
            f"{len(self.deficient)} heads of lower rank)"
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

    def tensors(self) -> dict[str, Tensor]:
        names = ("singular_values", "to_query", "to_key", "rank", "reconstruction_error")
        return {name: getattr(self, name) for name in names}

    def to(self, dtype: torch.dtype, device: torch.device) -> ModelChannels:
        moved = {
            n: t.to(device, dtype if t.is_floating_point() else t.dtype) for n, t in self.tensors().items()
        }
        return ModelChannels(**moved, bias=self.bias)


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
    queries, keys = W_Q.double(), W_K.double()
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
    singular = torch.linalg.svdvals(torch.stack([thin_triangle(layer.double())[0] for layer in W]))
    largest, smallest = singular[..., 0], singular[..., -1]
    return torch.where(smallest <= RANK_TOLERANCE * largest, torch.inf, largest / smallest)


def _check(svd: HeadSVD, layer: int) -> None:
    worst = int(svd.error.argmax())
    if not float(svd.error[worst]) <= RECONSTRUCTION_TOLERANCE:
        raise IdentityError(
            f"The channels of {head_name(layer, worst)} do not give back its query-key form: relative error "
            f"{float(svd.error[worst]):.1e} (allowed {RECONSTRUCTION_TOLERANCE:.0e}). Are the weights finite?"
        )


def _with_bias(W: Tensor, b: Tensor) -> Tensor:
    """Homogeneous coordinates: the bias as one more input dimension."""
    return torch.cat((W, b[:, None]), dim=1)


def key_weights(model: Model, layer: int, bias: Bias = "offset") -> Float[Tensor, "kv_head d_model d_head"]:
    """W_K of one layer's key-value heads; in homogeneous coordinates with the bias as one more row."""
    W_K, b_K = model.weights.W_K[layer], model.weights.b_K[layer]
    return _with_bias(W_K, b_K) if bias == "homogeneous" else W_K


def layer_svd(model: Model, layer: int, bias: Bias = "offset") -> HeadSVD:
    """Singular vectors and values of one layer's heads (``U`` and ``V`` are not kept for the whole model)."""
    weights = model.weights
    queries = weights.W_Q[layer]
    if bias == "homogeneous":
        if model.architecture.rotary:
            raise InputError(
                f"bias='homogeneous' needs a model without rotary positions; {model.architecture.name} has "
                "them. Use bias='offset'."
            )
        queries = _with_bias(queries, weights.b_Q[layer])
    svd = svd_heads(queries, key_weights(model, layer, bias))
    _check(svd, layer)
    return svd


@torch.inference_mode()
def decompose_model(model: Model, bias: Bias = "offset") -> ModelChannels:
    """All heads of a model, computed anew, in float64."""
    layers = [layer_svd(model, layer, bias) for layer in range(model.n_layers)]
    S = torch.stack([svd.S for svd in layers])
    return ModelChannels(
        singular_values=S,
        to_query=torch.stack([svd.to_query for svd in layers]),
        to_key=torch.stack([svd.to_key for svd in layers]),
        rank=(RANK_TOLERANCE * S[..., :1] < S).sum(dim=-1),
        reconstruction_error=torch.stack([svd.error for svd in layers]),
        bias=bias,
    )


def model_channels(model: Model, bias: Bias = "offset", dtype: torch.dtype | None = None) -> ModelChannels:
    """All heads of a model in its dtype (or the one given), from the cache if it saw these weights before."""
    dtype = model.dtype if dtype is None else dtype
    if model.n_layers * model.n_heads * model.d_head**2 < CACHE_FROM_NUMBERS:
        return decompose_model(model, bias).to(dtype, model.device)
    path = cache_folder("channels") / f"{model.weights_sha256}-{bias}-1.safetensors"
    channels = _kept(path, bias)
    if channels is None:
        channels = decompose_model(model, bias)
        _keep(path, channels)
    return channels.to(dtype, model.device)


def _kept(path: Path, bias: Bias) -> ModelChannels | None:
    """Channels from the cache; None if they are not there or not what was written."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            written = (file.metadata() or {}).get("sha256")
    except (OSError, SafetensorError, ValueError):
        return None
    return ModelChannels(**tensors, bias=bias) if written == _digest(tensors) else None


def _keep(path: Path, channels: ModelChannels) -> None:
    tensors = {name: tensor.contiguous().cpu() for name, tensor in channels.tensors().items()}
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
