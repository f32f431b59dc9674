"""Attention patterns of a recording, kept whole or computed again from queries and keys where they would not fit; and
firings found in them.

All patterns of a prompt of n tokens are ``layers x heads x n x n`` numbers: 18 GB for SmolLM2-135M at 4,096 tokens.
What a trace reads of them are rows (what a token attends to), columns (who attends to a token) and single weights, and
each follows from the recorded queries and keys and one number per row, the logarithm of its sum.

Firings are found by name (``L9H6:to:John``), by words, or by how strongly heads attend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.errors import InputError
from headtrace.vocabulary import Firing, FiringName, TokenPlace, head_name

if TYPE_CHECKING:
    import polars as pl

    from headtrace.models.recording import Recording


BLOCK = 128
"""Destinations whose largest attention weights are kept together, where patterns are not."""
SINGLED = 32
"""Destinations whose attention is added up exactly for a bound."""
NUMBERS_AT_ONCE = 16_000_000
"""Attention weights that are computed at once (64 MB in float32)."""

T = TypeVar("T")
Place = int | Int[Tensor, "*#n"]


def n_blocks(length: int) -> int:
    return -(-length // BLOCK)


class Patterns(ABC):
    """The attention of every head, by parts."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    @abstractmethod
    def at(self, layer: Place, prompt: Place, head: Place, dest: Place, src: Place) -> Float[Tensor, "*n"]:
        """Single weights."""

    @abstractmethod
    def row(self, layer: int, prompt: int, head: int, dest: int) -> Float[Tensor, " src"]:
        """All that one head attends to from one destination."""

    @abstractmethod
    def rows(
        self, top: int, prompt: Int[Tensor, " n"], dest: Int[Tensor, " n"], length: int
    ) -> Float[Tensor, "n layer head src"]:
        """Rows of all heads below a layer, of one destination in each of some prompts."""

    @abstractmethod
    def columns(
        self,
        layer: Int[Tensor, "a n"],
        prompt: Int[Tensor, "a 1"],
        head: Int[Tensor, "a n"],
        src: Int[Tensor, "a n"],
        length: int,
    ) -> Float[Tensor, "a n dest"]:
        """Columns: how strongly destinations attend to one source of one head."""

    @abstractmethod
    def reach(
        self, top: int, prompt: int, weight: Float[Tensor, "*layer n dest"]
    ) -> Float[Tensor, "layer head n src"]:
        """No less than ``sum over dest of weight[dest] A[dest, src]`` (weights are not negative), for all heads below a
        layer; ``weight`` may have an axis of layers, before it one for heads."""

    @abstractmethod
    def of_head(self, layer: int, head: int) -> Float[Tensor, "batch dest src"]:
        """The pattern of one head, whole."""

    @abstractmethod
    def of_layer(self, layer: int) -> Float[Tensor, "batch head dest src"]:
        """The patterns of one layer, whole."""

    @abstractmethod
    def mixed(
        self, layer: int, values: Float[Tensor, "batch head src d_head"]
    ) -> Float[Tensor, "batch head dest d_head"]:
        """``A @ values`` of one layer."""

    @abstractmethod
    def turned(
        self, layer: int, onto: Float[Tensor, "batch head dest d_head"]
    ) -> Float[Tensor, "batch head src d_head"]:
        """``A^T @ onto`` of one layer."""


class KeptPatterns(Patterns):
    """Patterns that are in memory."""

    @property
    def tensor(self) -> Float[Tensor, "layer batch head dest src"]:
        return self.recording.tensors["patterns"]

    def at(self, layer: Place, prompt: Place, head: Place, dest: Place, src: Place) -> Float[Tensor, "*n"]:
        return self.tensor[layer, prompt, head, dest, src]

    def row(self, layer: int, prompt: int, head: int, dest: int) -> Float[Tensor, " src"]:
        return self.tensor[layer, prompt, head, dest]

    def rows(self, top: int, prompt: Tensor, dest: Tensor, length: int) -> Float[Tensor, "n layer head src"]:
        return self.tensor[:top, :, :, :, :length][:, prompt, :, dest]

    def columns(
        self, layer: Tensor, prompt: Tensor, head: Tensor, src: Tensor, length: int
    ) -> Float[Tensor, "a n dest"]:
        return self.tensor[:, :, :, :length][layer, prompt, head, :, src]

    def reach(
        self, top: int, prompt: int, weight: Float[Tensor, "*layer n dest"]
    ) -> Float[Tensor, "layer head n src"]:
        n = weight.shape[-1]
        return weight @ self.tensor[:top, prompt, :, :n, :n]

    def of_head(self, layer: int, head: int) -> Float[Tensor, "batch dest src"]:
        return self.tensor[layer][:, head]

    def of_layer(self, layer: int) -> Float[Tensor, "batch head dest src"]:
        return self.tensor[layer]

    def mixed(self, layer: int, values: Tensor) -> Float[Tensor, "batch head dest d_head"]:
        return self.tensor[layer] @ values

    def turned(self, layer: int, onto: Tensor) -> Float[Tensor, "batch head src d_head"]:
        return self.tensor[layer].transpose(-1, -2) @ onto


class RecomputedPatterns(Patterns):
    """Patterns that are computed again, part by part, from queries, keys and the logarithms of their rows' sums."""

    def _kept(self, name: str, make: Callable[[], T]) -> T:
        known = self.recording.recomputing
        if name not in known:
            known[name] = make()
        return known[name]

    @property
    def _scales(self) -> Float[Tensor, " layer"]:
        return self._kept("scales", lambda: self.recording.queries.new_tensor(self.recording.scales))

    @property
    def _caps(self) -> Float[Tensor, " layer"]:
        """Softcaps, zero where there is none."""
        caps = [cap or 0.0 for cap in self.recording.softcaps]
        return self._kept("caps", lambda: self.recording.queries.new_tensor(caps))

    @property
    def _masks(self) -> tuple[list[Bool[Tensor, "batch dest src"]], Int[Tensor, " layer"]]:
        """The masks that there are, and which one each layer has."""
        return self._kept("masks", self._find_masks)

    def _find_masks(self) -> tuple[list[Bool[Tensor, "batch dest src"]], Int[Tensor, " layer"]]:
        masks: list[Tensor] = []
        kinds: list[int] = []
        for mask in self.recording.visible:
            same = [i for i, known in enumerate(masks) if known.data_ptr() == mask.data_ptr()]
            kinds.append(same[0] if same else len(masks))
            if not same:
                masks.append(mask)
        return masks, torch.tensor(kinds, device=self.recording.token_ids.device)

    @property
    def _group(self) -> int:
        return self.recording.model.weights.group

    def _attention(self, layer: Place, logits: Tensor, normaliser: Tensor, visible: Tensor) -> Tensor:
        """Weights from logits before scale and softcap."""
        logits = logits * self._scales[layer]
        caps = self._caps[layer]
        if bool((self._caps > 0).any()):
            safe = caps.clamp_min(1e-30)
            logits = torch.where(caps > 0, torch.tanh(logits / safe) * safe, logits)
        return (logits - normaliser).masked_fill(~visible, -torch.inf).exp()

    def _visible(self, layer: Place, prompt: Place, dest: Place, src: Place) -> Tensor:
        masks, kinds = self._masks
        found = masks[0][prompt, dest, src]
        for i, mask in enumerate(masks[1:], 1):
            found = torch.where(kinds[layer] == i, mask[prompt, dest, src], found)
        return found

    def at(self, layer: Place, prompt: Place, head: Place, dest: Place, src: Place) -> Float[Tensor, "*n"]:
        rec = self.recording
        logits = (
            rec.queries[layer, prompt, head, dest] * rec.keys[layer, prompt, head // self._group, src]
        ).sum(-1)
        normaliser = rec.log_normalisers[layer, prompt, head, dest]
        return self._attention(layer, logits, normaliser, self._visible(layer, prompt, dest, src))

    def row(self, layer: int, prompt: int, head: int, dest: int) -> Float[Tensor, " src"]:
        rec = self.recording
        logits = rec.keys[layer, prompt, head // self._group] @ rec.queries[layer, prompt, head, dest]
        normaliser = rec.log_normalisers[layer, prompt, head, dest]
        return self._attention(layer, logits, normaliser, rec.visible[layer][prompt, dest])

    def rows(self, top: int, prompt: Tensor, dest: Tensor, length: int) -> Float[Tensor, "n layer head src"]:
        rec = self.recording
        n, n_heads = len(prompt), rec.model.n_heads
        out = rec.queries.new_empty(n, top, n_heads, length)
        for layer in range(top):
            queries = rec.queries[layer][prompt, :, dest].unflatten(1, (-1, self._group))
            logits = queries @ rec.keys[layer, :, :, :length][prompt].transpose(-1, -2)
            normaliser = rec.log_normalisers[layer][prompt, :, dest][..., None]
            seen = rec.visible[layer][prompt, dest, :length][:, None]
            out[:, layer] = self._attention(layer, logits.flatten(1, 2), normaliser, seen)
        return out

    def columns(
        self, layer: Tensor, prompt: Tensor, head: Tensor, src: Tensor, length: int
    ) -> Float[Tensor, "a n dest"]:
        rec, model = self.recording, self.recording.model
        prompt = prompt.expand_as(layer)
        out = rec.queries.new_empty(*layer.shape, length)
        which = (prompt * model.n_layers + layer) * model.n_heads + head
        for number in which.unique().tolist():
            rest, h = divmod(number, model.n_heads)
            p, l = divmod(rest, model.n_layers)
            mine = which == number
            sources = src[mine]
            logits = rec.keys[l, p, h // self._group][sources] @ rec.queries[l, p, h, :length].T
            seen = rec.visible[l][p, :length][:, sources].T
            out[mine] = self._attention(l, logits, rec.log_normalisers[l, p, h, :length], seen)
        return out

    def reach(
        self, top: int, prompt: int, weight: Float[Tensor, "*layer n dest"]
    ) -> Float[Tensor, "layer head n src"]:
        """The few destinations that weigh most one by one, the others from the largest attention of their blocks."""
        n = weight.shape[-1]
        if top == 0:  # no layer below
            return weight.new_empty(0, self.recording.model.n_heads, weight.shape[-2], n)
        blocks = n_blocks(n)
        heaviest = weight.flatten(0, -3).amax(dim=0) if weight.ndim > 2 else weight
        singled = heaviest.topk(min(SINGLED, n), dim=-1).indices
        rest = weight.scatter(-1, singled.expand(*weight.shape[:-1], -1), 0.0)
        padded = torch.nn.functional.pad(rest, (0, blocks * BLOCK - n))
        by_block = padded.unflatten(-1, (blocks, BLOCK)).sum(-1)
        bound = by_block @ self.recording.column_maxima[:top, prompt, :, :blocks, :n]
        for row, dest in enumerate(singled):
            attention = self.rows(top, torch.full_like(dest, prompt), dest, n)
            own = weight[..., row, dest].reshape(-1, len(dest)).expand(top, -1)
            bound[:, :, row] += torch.einsum("ld,dlhs->lhs", own, attention)
        return bound

    def blocks(self, layer: int) -> Iterator[tuple[slice, Float[Tensor, "batch head dest src"]]]:
        """The patterns of one layer, some destinations at a time."""
        rec = self.recording
        batch, n_heads, length, _ = rec.queries[layer].shape
        step = max(1, NUMBERS_AT_ONCE // (batch * n_heads * length))
        keys = rec.keys[layer].transpose(-1, -2)[:, :, None]
        for first in range(0, length, step):
            some = slice(first, first + step)
            queries = rec.queries[layer][:, :, some].unflatten(1, (-1, self._group))
            logits = (queries @ keys).flatten(1, 2)
            normaliser = rec.log_normalisers[layer][:, :, some][..., None]
            yield some, self._attention(layer, logits, normaliser, rec.visible[layer][:, None, some])

    def of_head(self, layer: int, head: int) -> Float[Tensor, "batch dest src"]:
        rec = self.recording
        logits = rec.queries[layer][:, head] @ rec.keys[layer][:, head // self._group].transpose(-1, -2)
        return self._attention(
            layer, logits, rec.log_normalisers[layer][:, head, :, None], rec.visible[layer]
        )

    def of_layer(self, layer: int) -> Float[Tensor, "batch head dest src"]:
        return torch.cat([block for _, block in self.blocks(layer)], dim=2)

    def mixed(self, layer: int, values: Tensor) -> Float[Tensor, "batch head dest d_head"]:
        return torch.cat([block @ values for _, block in self.blocks(layer)], dim=2)

    def turned(self, layer: int, onto: Tensor) -> Float[Tensor, "batch head src d_head"]:
        total = torch.zeros_like(onto)
        for some, block in self.blocks(layer):
            total += block.transpose(-1, -2) @ onto[:, :, some]
        return total


def attended_pairs(
    recording: Recording,
    min: float = 0.3,
    *,
    head: str | None = None,
    dest: int | str | None = None,
    src: int | str | None = None,
    prompt: int = 0,
) -> pl.DataFrame:
    """A row per pair that a head attends to with at least ``min``: see `Recording.firings`."""
    import polars as pl

    b, tokens = recording.prompt_index(prompt), recording.tokens(prompt)
    n = recording.lengths[b]
    wanted = None if head is None else FiringName.parse(head)
    if wanted is not None:
        check_firing(recording, Firing(wanted.layer, wanted.head, 0, 0), prompt)
    chosen: list[Tensor] = []
    for given in (dest, src):
        mask = torch.full((n,), given is None, device=recording.token_ids.device)
        if given is not None:
            positions = TokenPlace.parse(given).positions(tokens)
            if max(positions) >= n:
                raise InputError(f"There is no position {max(positions)}: the prompt has 0 to {n - 1}.")
            mask[list(positions)] = True
        chosen.append(mask)
    found: list[Tensor] = []
    for layer in range(recording.model.n_layers) if wanted is None else [wanted.layer]:
        pattern = recording.pattern(layer)[b, :, :n, :n]
        fits = (pattern >= min) & recording.visible[layer][b, :n, :n] & chosen[0][:, None] & chosen[1]
        if wanted is not None:
            fits[[h for h in range(len(fits)) if h != wanted.head]] = False
        places = fits.nonzero()
        strength = pattern[places.unbind(1)].double()
        found.append(torch.cat((torch.full_like(places[:, :1], layer), places), dim=1).double())
        found[-1] = torch.cat((found[-1], strength[:, None]), dim=1)
    rows = [(*map(int, row[:4]), row[4]) for row in torch.cat(found).tolist()]
    schema = dict.fromkeys(("layer", "head", "dest", "src"), pl.Int64) | {"attention": pl.Float64}
    frame = pl.DataFrame(rows, schema=schema, orient="row").sort("attention", descending=True)
    named = [str(Firing(*row)) for row in frame.select("layer", "head", "dest", "src").rows()]
    words = {"from": [tokens[i] for i in frame["dest"]], "to": [tokens[i] for i in frame["src"]]}
    columns = [pl.Series(name, values, pl.String) for name, values in {"firing": named, **words}.items()]
    order = ("firing", "layer", "head", "dest", "src", "from", "to", "attention")
    return frame.with_columns(columns).select(order)


def find_firing(recording: Recording, given: Firing | str, prompt: int = 0) -> tuple[Firing, str | None]:
    """The firing that a name or words mean, and what was assumed to find it: see `Recording.find_firing`."""
    if isinstance(given, Firing):
        check_firing(recording, given, prompt)
        return given, None
    name, b, tokens = FiringName.parse(given), recording.prompt_index(prompt), recording.tokens(prompt)
    layer, head, n = name.layer, name.head, recording.lengths[b]
    dests, srcs = (None if place is None else place.positions(tokens) for place in (name.dest, name.src))
    if dests is not None and srcs is not None and len(dests) == len(srcs) == 1:
        firing = Firing(layer, head, dests[0], srcs[0])
        check_firing(recording, firing, prompt)
        return firing, None
    some = (dests or (0,))[0]
    check_firing(recording, Firing(layer, head, some, some), prompt)
    attention = recording.attention.of_head(layer, head)[b, :n, :n]
    if dests is None or srcs is None:
        dest, first = None if name.dest is None else name.dest.one(tokens), 0 if dests or n == 1 else 1
        found = attention[first:, first:] if dest is None else attention[dest : dest + 1]
        row, src = divmod(int(found.argmax()), found.shape[1])
        firing = Firing(layer, head, first + row if dest is None else dest, first + src)
        if dest is None:
            past = " past the first token" if first else ""
            said = f"alone: {firing.dest}->{firing.src} is the strongest pair of the head{past}."
        else:
            said = f"without a source: {firing.dest} attends to {firing.src} most."
        return firing, f"{given.strip()} was given {said}"
    seen = recording.visible[layer][b]
    pairs = [(d, s) for d in dests for s in srcs if max(d, s) < n and bool(seen[d, s])]
    if len(pairs) > 1:
        assert name.dest is not None
        assert name.src is not None
        of_dest, of_src = name.dest.choices(tokens), name.src.choices(tokens)
        pairs.sort(key=lambda pair: -float(attention[pair]))
        listed = ", ".join(
            f"{name.written(of_dest[d], of_src[s])} (attention {float(attention[d, s]):.3f})"
            for d, s in pairs[:8]
        )
        more = f" and {len(pairs) - 8} others" if len(pairs) > 8 else ""
        raise InputError(f"{given.strip()!r} could mean {len(pairs)} pairs of tokens: write {listed}{more}.")
    dest, src = pairs[0] if pairs else (dests[-1], srcs[0])
    check_firing(recording, Firing(layer, head, dest, src), prompt)
    return Firing(layer, head, dest, src), None


def check_firing(recording: Recording, firing: Firing, prompt: int = 0) -> None:
    """Refuse a firing of a head or position that is not there, or whose destination does not see its source."""
    model, length = recording.model, recording.lengths[recording.prompt_index(prompt)]
    if firing.layer >= model.n_layers or firing.head >= model.n_heads:
        raise InputError(
            f"There is no head {head_name(firing.layer, firing.head)} in {model.name!r}: it has layers 0 to "
            f"{model.n_layers - 1} and heads 0 to {model.n_heads - 1}."
        )
    if firing.dest >= length or firing.src >= length:
        raise InputError(
            f"The firing {firing} is outside the prompt, which has {length} tokens "
            f"(positions 0 to {length - 1})."
        )
    seen = recording.visible[firing.layer][prompt, firing.dest]
    if not bool(seen[firing.src]):
        first, last = (int(seen.nonzero()[i, 0]) for i in (0, -1))
        raise InputError(
            f"{firing}: in layer {firing.layer}, position {firing.dest} does not see position {firing.src}: it "
            f"sees {first} to {last}, others are not visible. A firing is head, destination, source: L9H6:14:3."
        )
