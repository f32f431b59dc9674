"""From a prompt to its circuit.

tracer = headtrace.Tracer(model)
circuit = tracer.trace("When Mary ...", answer=" Mary", wrong=" John")
why = tracer.explain("When Mary ...", firing="L9H6:14:3")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from headtrace.circuits import Circuit
from headtrace.errors import InputError
from headtrace.tracing.acc import ACC
from headtrace.tracing.accpp import ACCpp
from headtrace.tracing.assemble import assemble, method_record
from headtrace.tracing.explanation import Explanation
from headtrace.tracing.firing import Tau
from headtrace.tracing.roots import (
    RootKind,
    RootSeeds,
    direction_root,
    heads_root,
    linear_root,
    probability_root,
)
from headtrace.tracing.svt import SVT
from headtrace.tracing.sweep import Budget, Method, sweep
from headtrace.tracing.upstream import Composer, LayerFirings
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

MethodName = Literal["acc++", "acc", "svt"]

TOKENS_AT_ONCE = 2048
"""Prompts are recorded and traced together as long as their padded tokens number at most this many."""


@dataclass(frozen=True)
class RootRequest:
    """What to explain about one prompt."""

    kind: RootKind
    answer: tuple[int, ...] = ()
    wrong: tuple[int, ...] | None = None
    top_k: int | None = None
    top_p: float | None = None
    direction: Tensor | None = None
    layer: int | None = None
    position: int = -1
    heads: tuple[str, ...] = ()

    def seeds(self, recording: Recording, prompt: int) -> RootSeeds:
        if self.heads:
            return heads_root(recording, prompt, self.heads)
        if self.kind == "direction":
            if self.direction is None or self.layer is None:
                raise InputError(
                    "root='direction' needs direction= (a vector of d_model numbers) and layer=."
                )
            return direction_root(recording, prompt, self.direction, self.layer, self.position)
        if self.kind == "linear":
            if not self.answer:
                raise InputError("root='linear' needs an answer, such as answer=' Mary'.")
            return linear_root(
                recording, prompt, list(self.answer), None if self.wrong is None else list(self.wrong)
            )
        return probability_root(recording, prompt, self._support(recording, prompt))

    def _support(self, recording: Recording, prompt: int) -> list[int]:
        given = sum(x is not None for x in (self.answer or None, self.top_k, self.top_p))
        if given != 1:
            raise InputError("root='probability' needs exactly one of: an answer, top_k=, top_p=.")
        if self.answer:
            return list(self.answer)
        probabilities, order = recording.last_logits(prompt).softmax(-1).sort(descending=True, stable=True)
        if self.top_k is not None:
            if not 1 <= self.top_k <= order.numel():
                raise InputError(f"top_k={self.top_k}: expected 1 to {order.numel()}.")
            return order[: self.top_k].tolist()
        if self.top_p is None or not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p}: expected a number above 0 and at most 1.")
        count = int((probabilities.cumsum(0) < self.top_p).sum()) + 1
        return order[:count].tolist()


class Tracer:
    """Traces prompts of one model. Keeps composed weights, so one tracer for many prompts is fastest.

    ``method`` is ``"acc++"`` (default), ``"acc"`` or ``"svt"``; ``tau`` a number or a function of the number
    of visible keys (default ``min(1, 2.5 / keys)``); ``max_firings`` and ``min_influence`` are the budget
    that keeps circuits of long prompts readable.
    """

    def __init__(
        self,
        model: Model,
        *,
        method: MethodName = "acc++",
        tau: Tau = None,
        ig_steps: int = 64,
        max_firings: int | None = Budget.max_firings,
        min_influence: float = Budget.min_influence,
        channels: Literal["signal", "all"] = "signal",
    ) -> None:
        _check_options(tau, ig_steps, max_firings, min_influence)
        self.model = model
        self.tau, self.ig_steps = tau, ig_steps
        self.budget = Budget(max_firings, min_influence)
        self.composer = Composer(model)
        self.method = self._method(method, channels)

    def _method(self, name: str, channels: str) -> Method:
        if name == "acc++":
            return ACCpp(self.composer, self.tau, self.ig_steps)
        if name == "acc":
            return ACC(self.composer, self.tau)
        if name == "svt":
            return SVT(self.composer, self.tau, all_channels=channels == "all")
        raise InputError(f"There is no method {name!r}: choose 'acc++', 'acc' or 'svt'.")

    def trace(
        self,
        prompt: Any,
        answer: Any = None,
        wrong: Any = None,
        *,
        root: RootKind | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        direction: Tensor | None = None,
        layer: int | None = None,
        position: int = -1,
        heads: Sequence[str] = (),
        bos: bool | None = None,
    ) -> Circuit:
        """The circuit of one prompt (text or token ids).

        ``answer`` and ``wrong`` are text, a token id, or a list of either. Without ``root``, a wrong answer
        makes it ``"linear"`` (the logit difference) and anything else ``"probability"``.
        ``heads=["L9H9", ...]`` starts from those heads at the last token instead.
        """
        request = self._request(answer, wrong, root, top_k, top_p, direction, layer, position)
        if heads:
            request = replace(request, heads=tuple(heads))
        return self._trace([prompt], [request], bos)[0]

    def trace_batch(
        self,
        prompts: Sequence[Any],
        answer: Any = None,
        wrong: Any = None,
        *,
        root: RootKind | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        bos: bool | None = None,
    ) -> list[Circuit]:
        """Circuits of many prompts, recorded and traced together.

        Prompts are text, token ids, or mappings with ``text`` (or ``tokens``), ``answer`` and ``wrong``; a
        single ``answer`` or ``wrong`` holds for all, a list has one for each prompt.
        """
        answers, wrongs = (
            _per_prompt(answer, len(prompts), "answer"),
            _per_prompt(wrong, len(prompts), "wrong"),
        )
        bare: list[Any] = []
        requests: list[RootRequest] = []
        for prompt, one_answer, one_wrong in zip(prompts, answers, wrongs, strict=True):
            if isinstance(prompt, Mapping):
                one_answer, one_wrong = prompt.get("answer", one_answer), prompt.get("wrong", one_wrong)
                prompt = prompt.get("text", prompt.get("tokens"))
            bare.append(prompt)
            requests.append(self._request(one_answer, one_wrong, root, top_k, top_p, None, None, -1))
        return self._trace(bare, requests, bos)

    def explain(self, prompt: Any, firing: Firing | str, *, bos: bool | None = None) -> Explanation:
        """Why does this head attend here? The causes of one firing, side by side."""
        wanted = Firing.parse(firing)
        recording = self.model.record(prompt, bos=bos, last_logits=True)
        _check_firing(recording, wanted)
        found = self.trace_firings(recording, [wanted])[0]
        return Explanation(found, recording.tokens(), self.model.name)

    def trace_firings(self, recording: Recording, firings: Sequence[Firing | str], prompt: int = 0) -> Any:
        """Causes of chosen firings of one recorded prompt, in the order given."""
        parsed = [Firing.parse(f) for f in firings]
        found: dict[Firing, Any] = {}
        for layer in sorted({f.layer for f in parsed}):
            mine = [f for f in dict.fromkeys(parsed) if f.layer == layer]
            rows = torch.tensor([(prompt, f.head, f.dest, f.src) for f in mine], device=self.model.device)
            for causes in self.method.trace(recording, LayerFirings(layer, *rows.unbind(dim=1))):
                found[causes.firing] = causes
        return [found[f] for f in parsed]

    # -- inside ----------------------------------------------------------------------------------------------

    def _request(
        self,
        answer: Any,
        wrong: Any,
        root: RootKind | None,
        top_k: int | None,
        top_p: float | None,
        direction: Tensor | None,
        layer: int | None,
        position: int,
    ) -> RootRequest:
        if root not in (None, "linear", "probability", "direction"):
            raise InputError(f"There is no root {root!r}: choose 'linear', 'probability' or 'direction'.")
        kind: RootKind = root or (
            "direction" if direction is not None else "linear" if wrong is not None else "probability"
        )
        if kind == "probability" and wrong is not None:
            raise InputError("A probability root has no wrong answer. Use root='linear', or leave wrong out.")
        answers = self._ids(answer, "answer")
        wrongs = None if wrong is None else self._ids(wrong, "wrong answer")
        if wrongs is not None and set(answers) & set(wrongs):
            raise InputError("The answer and the wrong answer are the same token: their difference is zero.")
        return RootRequest(kind, answers, wrongs, top_k, top_p, direction, layer, position)

    def _ids(self, answer: Any, what: str) -> tuple[int, ...]:
        if answer is None:
            return ()
        many = [answer] if isinstance(answer, (str, int)) else list(answer)
        return tuple(dict.fromkeys(self.model.token_id(one, what) for one in many))

    def _trace(self, prompts: list[Any], requests: list[RootRequest], bos: bool | None) -> list[Circuit]:
        ids = [self.model.to_ids(prompt, bos=bos) for prompt in prompts]
        circuits: dict[int, Circuit] = {}
        for group in _groups([len(i) for i in ids]):
            recording = self.model.record([ids[i] for i in group], last_logits=True)
            roots = [requests[i].seeds(recording, place) for place, i in enumerate(group)]
            for place, (i, trace) in enumerate(
                zip(group, sweep(recording, roots, self.method, self.budget), strict=True)
            ):
                text = prompts[i] if isinstance(prompts[i], str) else None
                answer, wrong = list(requests[i].answer), requests[i].wrong
                circuits[i] = assemble(
                    recording,
                    place,
                    text,
                    trace,
                    self._record(),
                    answer,
                    None if wrong is None else list(wrong),
                )
        return [circuits[i] for i in range(len(prompts))]

    def _record(self) -> Any:
        tau = (
            "min(1, 2.5 / visible keys)"
            if self.tau is None
            else self.tau
            if not callable(self.tau)
            else "custom"
        )
        if self.method.name == "svt" and self.tau is None:
            tau = 0.5
        settings: dict[str, Any] = {
            "max_firings": self.budget.max_firings,
            "min_influence": self.budget.min_influence,
        }
        if self.method.name == "svt":
            settings["channels"] = "all" if getattr(self.method, "all_channels", False) else "signal"
        ig_steps = self.ig_steps if self.method.name == "acc++" else None
        return method_record(self.method.name, tau, ig_steps, settings)


def _check_options(tau: Tau, ig_steps: int, max_firings: int | None, min_influence: float) -> None:
    if tau is not None and not callable(tau) and not 0 < tau <= 1:
        raise InputError(f"tau={tau}: a threshold on attention is above 0 and at most 1.")
    if ig_steps < 1:
        raise InputError(f"ig_steps={ig_steps}: expected at least 1.")
    if max_firings is not None and max_firings < 1:
        raise InputError(f"max_firings={max_firings}: expected at least 1, or None for no limit.")
    if not 0 <= min_influence <= 1:
        raise InputError(f"min_influence={min_influence}: a share of influence is between 0 and 1.")


def _check_firing(recording: Recording, firing: Firing) -> None:
    model, length = recording.model, recording.lengths[0]
    if firing.layer >= model.n_layers or firing.head >= model.n_heads:
        raise InputError(
            f"{firing}: the model has layers 0 to {model.n_layers - 1} and heads 0 to {model.n_heads - 1}."
        )
    if firing.dest >= length or firing.src >= length:
        raise InputError(f"{firing}: the prompt has positions 0 to {length - 1}.")
    if not bool(recording.visible[firing.layer][0, firing.dest, firing.src]):
        raise InputError(
            f"{firing}: position {firing.src} is not visible from {firing.dest} in layer {firing.layer}."
        )


def _per_prompt(value: Any, n: int, what: str) -> list[Any]:
    if value is None or isinstance(value, (str, int)):
        return [value] * n
    if len(value) != n:
        raise InputError(f"{len(value)} {what} values for {n} prompts: give one for all, or one for each.")
    return list(value)


def _groups(lengths: list[int]) -> list[list[int]]:
    """Prompts to record together: similar lengths, so that little is padded, and a bounded number of tokens."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[i] * (len(groups[-1]) + 1) <= TOKENS_AT_ONCE:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
