"""From what a user asks to what is traced: token ids and a root.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> ask(model, "When Mary and John went to the store, John gave a drink to", answer=" Mary").root.question()
'"Mary"'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headtrace.errors import InputError
from headtrace.prompts import Chat, as_prompts, one_prompt
from headtrace.roots import ROOTS, Root
from headtrace.tasks.examples import Example
from headtrace.vocabulary import Prompt

if TYPE_CHECKING:
    from headtrace.models import Model


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
        return len(self.root.answer_prefix) + 1


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
    if made.answer_prefix:
        ids = model.to_ids([*ids, *made.answer_prefix])
    return Question(ids, made.with_words(model), text, other)


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
    if kind == "probability" and "wrong" in given:
        raise InputError("A probability root has no wrong answer. Use root='linear', or leave wrong out.")
    for name in given:  # nothing that is asked for may be left without effect
        if name not in ROOTS[kind].options:
            other = next((k for k, root in ROOTS.items() if name in root.options), None)
            hint = "" if other is None else f" {name} belongs to root={other!r}."
            raise InputError(
                f"A {kind} root does not use {name}: it takes {', '.join(ROOTS[kind].options)}.{hint}"
            )
    return ROOTS[kind].from_options(model, prompt, length, given)
