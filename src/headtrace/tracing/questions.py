"""From what a user asks to what is traced: token ids and a root.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> ask(model, "When Mary and John went to the store, John gave a drink to", answer=" Mary").root.question()
'"Mary"'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headtrace.errors import InputError
from headtrace.prompts import Chat, as_prompts, one_prompt
from headtrace.roots import ROOTS, Direction, Heads, Likelihood, LogitDifference, Root
from headtrace.tasks.examples import Example
from headtrace.vocabulary import Prompt

if TYPE_CHECKING:
    from headtrace.models import Model

Answer = str | int | Sequence[str | int]
"""Text, a token id, or several alternatives of either."""

OPTIONS = {
    "linear": ("answer", "wrong"),
    "probability": ("answer", "top_k", "top_p"),
    "direction": ("direction", "layer", "position"),
    "heads": ("heads",),
}
"""What each kind of root is asked with."""


@dataclass(frozen=True)
class Question:
    """One prompt and what to explain about it."""

    ids: list[int]
    """The tokens that the model runs on; a continuation's own tokens but the last are among them."""
    root: Root
    text: str | None = None
    counterfactual: Prompt | None = None
    """What stands against it, if the prompt came with one."""

    @property
    def logits_needed(self) -> int:
        """From how many positions at the end the root is read."""
        return len(self.root.answer) if isinstance(self.root, Likelihood) and self.root.continuation else 1


Asked = Prompt | Example | Question
"""A prompt as it can be traced: bare, a mapping or an example with answers of its own, or a question made already."""

_PROMPT = ("text", "tokens", "messages")
"""Where a mapping with answers of its own has its prompt."""
_OWN = ("answer", "wrong", "counterfactual")


def as_asked(prompts: Asked | Sequence[Asked]) -> list[Any]:
    """One prompt or many, each as ``ask`` takes it."""
    if isinstance(prompts, (Example, Question)) or (
        isinstance(prompts, Mapping) and "input_ids" not in prompts
    ):
        return [prompts]
    return [] if isinstance(prompts, (list, tuple)) and not prompts else list(as_prompts(prompts))


def ask(
    model: Model,
    prompt: Asked,
    *,
    root: str | Root | None = None,
    bos: bool | None = None,
    **asked: Any,
) -> Question:
    """A question about one prompt; a prompt that comes with its own answers (a mapping, an example) keeps them."""
    if isinstance(prompt, Question):
        return prompt
    given_prompt, text, own = _opened(prompt)
    bare = one_prompt(given_prompt)
    text = model.reader.text(bare) if text is None else text
    other = own.pop("counterfactual", None)
    given = {name: value for name, value in {**asked, **own}.items() if value is not None}
    ids = model.to_ids(bare, bos=bos)
    if root is None or isinstance(root, str):
        made = _make(model, text if isinstance(prompt, Example) and text else bare, len(ids), root, given)
    elif given:
        raise InputError(f"The root {root!r} says already what to explain: leave out {', '.join(given)}.")
    else:
        made = root
    if isinstance(made, Likelihood) and made.continuation:
        ids = model.to_ids([*ids, *made.answer[:-1]])
    return Question(ids, _with_words(model, made), text, other)


def _opened(prompt: Any) -> tuple[Prompt, str | None, dict[str, Any]]:
    """The bare prompt, its text if known, and the answers that come with it."""
    if isinstance(prompt, Example):
        own = {"answer": prompt.answer_ids, "wrong": prompt.wrong_ids}
        return prompt.token_ids, prompt.text, own
    if not isinstance(prompt, Mapping) or "input_ids" in prompt:
        return prompt, None, {}
    named = [name for name in _PROMPT if prompt.get(name) is not None]
    if len(named) != 1:
        raise InputError(
            f"A prompt needs 'text' or 'tokens' or 'messages', one of them (and answer, wrong, counterfactual); got "
            f"{', '.join(map(str, prompt)) or 'nothing'}."
        )
    own = {name: prompt[name] for name in _OWN if prompt.get(name) is not None}
    return prompt[named[0]], None, own


def _make(model: Model, prompt: Prompt | Chat, length: int, kind: str | None, given: dict[str, Any]) -> Root:
    if kind is None:
        kind = next((k for k in ("direction", "heads") if k in given), None) or (
            "linear" if "wrong" in given else "probability"
        )
    if kind not in ROOTS:
        raise InputError(f"There is no root {kind!r}: choose {', '.join(map(repr, ROOTS))}.")
    _check(kind, given)
    return _MAKERS[kind](model, prompt, length, given)


def _check(kind: str, given: Mapping[str, Any]) -> None:
    """Nothing that is asked for may be left without effect."""
    if kind == "probability" and "wrong" in given:
        raise InputError("A probability root has no wrong answer. Use root='linear', or leave wrong out.")
    for name in given:
        if name not in OPTIONS[kind]:
            other = next((k for k, names in OPTIONS.items() if name in names), None)
            hint = "" if other is None else f" {name} belongs to root={other!r}."
            raise InputError(f"A {kind} root does not use {name}: it takes {', '.join(OPTIONS[kind])}.{hint}")


def _linear(model: Model, prompt: Prompt | Chat, length: int, given: dict[str, Any]) -> Root:
    if "answer" not in given:
        raise InputError("root='linear' needs an answer, such as answer=' Mary'.")
    answer = _ids(model, prompt, given["answer"], "answer")
    wrong = _ids(model, prompt, given["wrong"], "wrong answer") if "wrong" in given else None
    if set(answer) & set(wrong or ()):
        raise InputError("The answer and the wrong answer are the same token: their difference is zero.")
    return LogitDifference(answer, wrong)


def _probability(model: Model, prompt: Prompt | Chat, length: int, given: dict[str, Any]) -> Root:
    if len(given) != 1:
        raise InputError("root='probability' needs exactly one of: an answer, top_k=, top_p=.")
    if "answer" not in given:
        return Likelihood(**given)
    many = _several(given["answer"])
    if len(many) > 1:
        return Likelihood(_ids(model, prompt, many, "answer"))
    tokens = model.continuation(prompt, many[0])
    return Likelihood(tokens, continuation=len(tokens) > 1)


def _direction(model: Model, prompt: Prompt | Chat, length: int, given: dict[str, Any]) -> Root:
    if "direction" not in given or "layer" not in given:
        raise InputError("root='direction' needs direction= (a vector of d_model numbers) and layer=.")
    vector: Any = given["direction"]
    if isinstance(vector, Tensor) and vector.ndim != 1:
        raise InputError(f"The direction has shape {tuple(vector.shape)}; expected ({model.d_model},).")
    position: int = given.get("position", -1)
    if not -length <= position < length:
        raise InputError(f"Position {position} does not exist in a prompt of {length} tokens.")
    numbers: Any = vector.tolist() if hasattr(vector, "tolist") else vector
    return Direction(given["layer"], position % length, tuple(numbers))


def _heads(model: Model, prompt: Prompt | Chat, length: int, given: dict[str, Any]) -> Root:
    names = [given["heads"]] if isinstance(given["heads"], str) else list(given["heads"])
    return Heads(tuple(name.strip() for name in names))


_MAKERS = {"linear": _linear, "probability": _probability, "direction": _direction, "heads": _heads}


def _several(answer: Answer) -> list[str | int]:
    many = [answer] if isinstance(answer, (str, int)) else list(answer)
    if not many:
        raise InputError("The list of answers is empty: give at least one.")
    return many


def _ids(model: Model, prompt: Prompt | Chat, answer: Answer, what: str) -> tuple[int, ...]:
    """Alternatives, each of which must be one token."""
    return tuple(dict.fromkeys(model.token_id(one, what, prompt) for one in _several(answer)))


def _with_words(model: Model, root: Root) -> Root:
    """Answers with the text of their tokens, for people."""
    if isinstance(root, LogitDifference):
        wrong = None if root.wrong is None else model.token_labels(root.wrong)
        return replace(root, answer_tokens=model.token_labels(root.answer), wrong_tokens=wrong)
    if isinstance(root, Likelihood) and root.answer:
        return replace(root, answer_tokens=model.token_labels(root.answer))
    return root
