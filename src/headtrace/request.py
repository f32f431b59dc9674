"""A request to trace a prompt: the one form that Python, the command line, runs, prompt files and the server share.

>>> request = TraceRequest.create("When Mary and John went to", answer=" the", labels={"form": "short"})
>>> request.to_json()
{'text': 'When Mary and John went to', 'answer': ' the', 'labels': {'form': 'short'}}
>>> TraceRequest.from_json(request.to_json()) == request
True
>>> TraceRequest.from_json({"text": "When Mary", "anwser": " and"})
Traceback (most recent call last):
headtrace.errors.InputError: unknown field 'anwser'. Did you mean 'answer'?

A line of a prompt file is a request in this JSON form. Fields that a line leaves out come from the options of the
command. To add an option, add a field to ``TraceRequest`` (or to the root or the method that it belongs to).
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from headtrace.errors import InputError, shown
from headtrace.lines import Lines, Record, read_lines
from headtrace.prompts.forms import Chat, as_prompts, batches, one_prompt
from headtrace.roots import ROOTS, Root
from headtrace.tasks.examples import Example, TaskSet
from headtrace.validation import LARGEST
from headtrace.vocabulary import PATHS, Paths

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.tracing.methods import Method

PatternsKept = Literal["auto", "keep", "recompute"]

PROMPT_FIELDS = ("text", "tokens", "messages")
TRACER_SETTINGS = ("method", "method_options", "max_firings", "min_influence", "patterns")
AUTO = "auto"
"""In the place of a counterfactual prompt: find some."""
NEEDS_DIFFERENCE = (
    'A counterfactual prompt goes with paths="difference" (--paths difference), which says what flows from the words '
    "that differ to the answer. Attention, content and complete circuits look at one prompt."
)
ROOT_OPTIONS = tuple(dict.fromkeys(name for root in ROOTS.values() for name in root.options))
"""What a request can say about its root, over all roots: answer, wrong, top_k, ..."""


@dataclass(frozen=True)
class TraceRequest:
    """One prompt, what to explain about it, and how. Checked when it is made, as far as that needs no model."""

    prompt: str | tuple[int, ...] | Chat
    """Text, token ids, or the messages of a conversation."""
    text: str | None = None
    """How a prompt of token ids reads, for people."""
    root: str | Root | None = field(
        default=None,
        metadata={
            "help": "What to explain: linear, probability, direction or heads (default: by the other options)."
        },
    )
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The options of the root (`BaseRoot.options`): answer, wrong, top_k, ... In JSON they stand beside the others."""
    paths: Paths = field(
        default="attention",
        metadata={
            "help": "What to follow: attention (why heads attend), content (what values and MLPs move), complete "
            "(both) or difference (what changed the answer compared with another prompt). Default: attention; for a "
            "single prompt complete, if attention finds nothing."
        },
    )
    counterfactual: str | tuple[Any, ...] | None = field(
        default=None,
        metadata={
            "help": "With difference: a prompt with the same number of tokens to compare with, or auto (prompts "
            "that flip the answer, found by replacing words). Repeat it to compare with the mean over several."
        },
    )
    neurons: int = field(
        default=0,
        metadata={
            "help": "With content or complete: list this many of the strongest hidden units of each MLP."
        },
    )
    bos: bool | None = field(
        default=None,
        metadata={"help": "Whether the text begins with the BOS token (default: as the tokenizer does)."},
    )
    method: str | Method = field(
        default="acc++",
        metadata={"help": "How causes are found: acc++, acc, svt, or a method that another package adds."},
    )
    method_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The options of the method, such as tau."""
    max_firings: int | None = field(
        default=200,
        metadata={
            "help": "Look for the causes of at most this many firings (attending heads) per prompt. With difference: "
            "keep this many components (default 100)."
        },
    )
    min_influence: float | None = field(
        default=None,
        metadata={
            "help": "Skip nodes through which a smaller share of the explained number passes (default: 0 for "
            "attention, 0.01 for difference, else 0.02)."
        },
    )
    patterns: PatternsKept = field(
        default="auto",
        metadata={
            "help": "Attention patterns: keep in memory, recompute (for long prompts), or auto (by size)."
        },
    )
    id: str | None = None
    """The user's own name for the prompt, kept in the tables of a run."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the prompt can be grouped by."""
    roles: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Names of positions: a token position, or the [start, end) characters of a word in the text."""

    @classmethod
    def create(cls, prompt: Any, **options: Any) -> TraceRequest:
        """A request from a prompt in any form, with options as keywords; an option that is None is left out.

        A prompt may also be an example of a task, or a mapping in the JSON form; what it says itself comes before
        the options. With a root that the options name, answers of the prompt that this root does not use are left
        aside: the examples of a task have wrong answers, which a probability does not need.
        """
        if isinstance(prompt, TraceRequest):
            return prompt
        options = {name: value for name, value in options.items() if value is not None}
        compared = "counterfactual" in options
        own: dict[str, Any] = {}
        if isinstance(prompt, Example):
            own = {"answer": prompt.answer_ids, "wrong": prompt.wrong_ids, "text": prompt.text}
            own |= {"labels": prompt.labels, "roles": prompt.roles}
            prompt = prompt.token_ids
        elif isinstance(prompt, Mapping) and "input_ids" not in prompt:
            given = cast("Mapping[Any, Any]", prompt)
            # A field that is null is left out, but for the budget, where it means that there is no limit.
            own = {str(k): v for k, v in given.items() if v is not None or k == "max_firings"}
            named = [name for name in PROMPT_FIELDS if name in own]
            if len(named) != 1 and named != ["text", "tokens"]:
                raise InputError(
                    "A prompt needs either 'text' or 'tokens' or 'messages', one of them (and answer, wrong, "
                    f"counterfactual ...); got {', '.join(own) or 'nothing'}."
                )
            prompt = own.pop(named[-1])
        options = _merged(options, own)
        takes = {each.name for each in fields(cls)} - {"prompt", "about"}
        for name in options:
            if name not in takes and name not in ROOT_OPTIONS:
                meant = get_close_matches(name, [*takes, *ROOT_OPTIONS], n=1)
                hint = f" Did you mean {meant[0]!r}?" if meant else ""
                raise InputError(f"A trace has no option {name!r}.{hint}")
        bare = one_prompt(prompt)
        request = cls(
            prompt=tuple(bare) if isinstance(bare, list) else bare,
            about={name: _plain(options.pop(name)) for name in ROOT_OPTIONS if name in options},
            **{name: _plain(value) for name, value in options.items()},
        )
        if compared and request.paths == "attention":
            raise InputError(NEEDS_DIFFERENCE)
        return request

    def __post_init__(self) -> None:
        if self.paths not in PATHS:
            raise InputError(f"paths={self.paths!r}: choose {', '.join(map(repr, PATHS))}.")
        if self.patterns not in get_args(PatternsKept):
            choices = ", ".join(map(repr, get_args(PatternsKept)))
            raise InputError(f"patterns={self.patterns!r}: choose {choices}.")
        for name, least in (("neurons", 0), ("max_firings", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                none = ", or None for no limit" if name == "max_firings" else ""
                raise InputError(f"{name}={shown(value)}: expected a whole number of at least {least}{none}.")
        least = self.min_influence
        if least is not None and not (
            isinstance(least, (int, float)) and not isinstance(least, bool) and 0 <= least <= 1
        ):
            raise InputError(f"min_influence={shown(least)}: a share of influence is between 0 and 1.")
        if self.bos not in (None, True, False):
            raise InputError(f"bos={shown(self.bos)}: expected true or false.")
        if self.counterfactual is not None and self.paths in ("content", "complete"):
            raise InputError(NEEDS_DIFFERENCE)
        if self.neurons and self.paths in ("attention", "difference"):
            raise InputError(
                f"neurons={self.neurons} lists hidden units by what they contribute to the root, which is known where "
                'content is followed: it goes with paths="content" or "complete".'
            )
        self._check_root()
        if self.id is not None and not (isinstance(self.id, str) and self.id):
            raise InputError(f"id: expected text that is not empty, got {shown(self.id)}.")
        for name, value in self.labels.items():
            if not isinstance(value, str):
                raise InputError(f"labels: {name!r} must be text, got {shown(value)}.")

    def _check_root(self) -> None:
        """Nothing that is asked of a root may be left without effect."""
        if self.root is not None and not isinstance(self.root, str):
            if self.about:
                raise InputError(
                    f"The root {self.root!r} already says what to explain: leave out {', '.join(self.about)}."
                )
            return
        if self.root is not None and self.root not in ROOTS:
            raise InputError(f"There is no root {self.root!r}: choose {', '.join(map(repr, ROOTS))}.")
        kind = self.root_kind
        if kind is None:
            return
        if kind == "probability" and "wrong" in self.about:
            raise InputError("A probability root has no wrong answer. Use root='linear', or leave wrong out.")
        for name in self.about:
            if name not in ROOTS[kind].options:
                other = next((k for k, root in ROOTS.items() if name in root.options), None)
                hint = "" if other is None else f" {name} belongs to root={other!r}."
                takes = ", ".join(ROOTS[kind].options)
                raise InputError(f"A {kind} root does not use {name}: it takes {takes}.{hint}")

    @property
    def root_kind(self) -> str | None:
        """The kind of root, as given or as the options imply; None where nothing says what to explain."""
        if self.root is not None:
            return self.root if isinstance(self.root, str) else self.root.kind
        named = next((kind for kind in ("direction", "heads") if kind in self.about), None)
        return named or ("linear" if "wrong" in self.about else "probability")

    @property
    def automatic(self) -> bool:
        """Whether the prompts to compare with are to be found by exchanging words."""
        return self.paths == "difference" and self.counterfactual in (None, AUTO)

    @property
    def tracer_settings(self) -> dict[str, Any]:
        """The fields that are settings of a ``Tracer``, and the same for all its prompts."""
        return {name: getattr(self, name) for name in TRACER_SETTINGS}

    # One JSON form

    def to_json(self) -> dict[str, Any]:
        """The request as JSON data; fields at their defaults are left out."""
        data: dict[str, Any] = {}
        if isinstance(self.prompt, str):
            data["text"] = self.prompt
        elif isinstance(self.prompt, Chat):
            data["messages"] = [dict(message) for message in self.prompt.messages]
        else:
            data["tokens"] = list(self.prompt)
            if self.text is not None:
                data["text"] = self.text
        for each in fields(self):
            value: Any = getattr(self, each.name)
            if each.name == "about":
                data |= {name: _jsonable(option) for name, option in self.about.items()}
            if each.name in ("prompt", "text", "about") or value == each.default or value in ({}, None):
                continue
            if each.name == "root" and not isinstance(value, str):
                from headtrace.validation import plain

                value = plain(value)
            if each.name == "method" and not isinstance(value, str):
                raise InputError("A method made in Python has no JSON form: give it by its name.")
            if each.name == "method_options" and any(map(callable, self.method_options.values())):
                raise InputError("A function has no JSON form: give tau as a number.")
            data[each.name] = _jsonable(value)
        if self.max_firings is None:
            data["max_firings"] = None
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any], **defaults: Any) -> TraceRequest:
        """A request from its JSON form; ``defaults`` are options for the fields that it does not have."""
        record = _checked_fields(data)
        root: Any = record.get("root")
        if isinstance(root, Mapping):
            record["root"] = _root_from_json(cast("Mapping[str, Any]", root))
        return cls.create(record, **defaults)

    def without_settings(self) -> TraceRequest:
        """The request with the default settings of a tracer: what concerns this prompt alone."""
        return replace(self, **standard_settings())

    @property
    def hash(self) -> str:
        """Sixteen hexadecimal digits that stand for the prompt and what is asked about it.

        The tracer's settings, id, labels and roles are left out: the same prompt has the same hash in other runs.
        """
        asked = replace(self.without_settings(), id=None, labels={}, roles={}, text=None)
        return hashlib.sha256(json.dumps(asked.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    # For a model

    def token_ids(self, model: Model) -> list[int]:
        """The tokens of the prompt."""
        bare: Any = list(self.prompt) if isinstance(self.prompt, tuple) else self.prompt
        return model.to_ids(bare, bos=self.bos)

    def resolve(self, model: Model) -> ResolvedRequest:
        """Token ids, a root with token ids, and the counterfactual's token ids, for one model."""
        bare: Any = list(self.prompt) if isinstance(self.prompt, tuple) else self.prompt
        ids = self.token_ids(model)
        text = self.text if isinstance(self.prompt, tuple) else model.reader.text(bare)
        if self.root is None and not self.about:
            from headtrace.tracing.prompt_words import ask

            found = ask(model, self)
            asked = found.root.question()
            notice = f"No answer was given: {asked} is the model's own answer and its rival."
            return replace(found, request=self, notice=notice)
        if self.root is None or isinstance(self.root, str):
            kind = self.root_kind or "probability"
            # Answers follow the text, where it is known: how they are split may depend on it.
            behind = bare if self.text is None or not self.about else self.text
            root: Root = ROOTS[kind].from_options(model, behind, len(ids), self.about)
        else:
            root = self.root
        prefix = list(root.answer_prefix)
        ids = model.to_ids([*ids, *prefix]) if prefix else ids
        others = self._counterfactuals(model, ids, prefix)
        return ResolvedRequest(self, ids, root.with_words(model), text, others)

    def _counterfactuals(self, model: Model, ids: list[int], prefix: list[int]) -> tuple[list[int], ...]:
        """Other prompts, as long as the prompt; none where they are to be found, or where nothing is compared."""
        if self.counterfactual is None or self.paths != "difference" or self.automatic:
            return ()
        given: Any = self.counterfactual
        several: list[Any] = [given] if isinstance(given, str) or _ids(given) else list(given)
        found: list[list[int]] = []
        for other in several:
            bare: Any = list(other) if isinstance(other, tuple) else other
            if isinstance(other, str) and isinstance(self.prompt, Chat):
                *before, last = self.prompt.messages
                bare = Chat((*before, {**last, "content": other}))
            bos = self.bos if isinstance(other, str) else None
            tokens = [*model.to_ids(bare, bos=bos), *prefix]
            if len(tokens) != len(ids):
                raise InputError(
                    _unequal(model, ids[: len(ids) - len(prefix)], tokens[: len(tokens) - len(prefix)])
                )
            if tokens == ids:
                raise InputError(
                    "The counterfactual prompt is the prompt itself, so nothing differs. Exchange the words that the "
                    'answer depends on, or give counterfactual="auto" (--counterfactual auto).'
                )
            found.append(tokens)
        return tuple(found)


@cache
def standard_settings() -> dict[str, Any]:
    """The settings that a tracer has where none are given."""
    return TraceRequest("the default settings").tracer_settings


def _unequal(model: Model, ids: list[int], other: list[int]) -> str:
    """Two prompts that cannot be compared position by position, and the word that makes them unequal."""
    from headtrace.tracing.prompt_words import words_of

    where = ""
    both = words_of(model, ids), words_of(model, other)
    texts = [[word.text for word in words] for words in both]
    for _, start, end, other_start, other_end in SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        parts = both[0][start:end], both[1][other_start:other_end]
        one, two = (sum(len(word.positions) for word in words) for words in parts)
        if one != two:
            here, there = (" ".join(word.text.strip() for word in words) for words in parts)
            where = f" ({there!r} is {two} and {here!r} {one})" if here and there else ""
            where = where or f" ({here or there!r} is only in the {'prompt' if here else 'counterfactual'})"
            break
    return (
        f"The counterfactual prompt has {len(other)} tokens, the prompt {len(ids)}{where}: they must be equally long, "
        "so that every position has its counterpart. Exchange words for others of as many tokens, or give "
        'counterfactual="auto" (--counterfactual auto), which finds some.'
    )


@dataclass(frozen=True)
class ResolvedRequest:
    """A request for one model: everything as token ids."""

    request: TraceRequest
    ids: list[int]
    """The tokens that the model runs on; those of a continuation but the last are among them."""
    root: Root
    text: str | None = None
    counterfactuals: tuple[list[int], ...] = ()
    """Prompts of the same length to compare with, where they are given."""
    notice: str | None = None
    """What was taken for granted, where the request did not say it."""

    @property
    def logits_needed(self) -> int:
        """From how many positions at the end the root is read."""
        return len(self.root.answer_prefix) + 1


def split_prompts(prompts: Any) -> list[Any]:
    """One prompt or many, in any form, as a list of prompts that ``TraceRequest.create`` takes."""
    if isinstance(prompts, TaskSet):
        return list(prompts)
    if isinstance(prompts, (TraceRequest, Example)) or (
        isinstance(prompts, Mapping) and "input_ids" not in prompts
    ):
        return [prompts]
    return [] if isinstance(prompts, (list, tuple)) and not prompts else list(as_prompts(prompts))


def batch_requests(requests: Sequence[ResolvedRequest]) -> list[list[int]]:
    """Which requests are traced together: places of those that follow the same paths, in batches of similar length."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, each in enumerate(requests):
        key = (each.request.paths, each.request.neurons, each.request.automatic)
        alike.setdefault(key, []).append(place)
    return [
        [places[i] for i in batch]
        for places in alike.values()
        for batch in batches([len(requests[place].ids) for place in places])
    ]


F = TypeVar("F", bound=Callable[..., Any])


def takes_request_options(function: F) -> F:
    """Show the options of a request, which a function takes as ``**options``, in its signature."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    names = [
        each.name for each in fields(TraceRequest) if each.name not in ("prompt", "about", *TRACER_SETTINGS)
    ]
    new = [name for name in dict.fromkeys([*ROOT_OPTIONS, *names]) if name not in signature.parameters]
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in new]
    vars(function)["__signature__"] = signature.replace(parameters=[*own, *added])
    return function


# -- prompt files --------------------------------------------------------------------------------------------


def read_requests(
    path: str | Path, *, strict: bool = False, chat: bool = False, **defaults: Any
) -> Lines[TraceRequest]:
    """The requests of a prompt file, one JSON object per line; ``defaults`` are options for what a line leaves out.

    A line that cannot be used is skipped and counted; with ``strict`` it is an error. With ``chat``, texts are messages
    of a user.
    """

    def parse(record: Record, where: str) -> TraceRequest:
        try:
            if "text" in record and "tokens" in record:
                raise InputError("needs either 'text' or 'tokens', got both.")
            if chat and "text" in record:
                message = {"role": "user", "content": record["text"]}
                record = {"messages": [message], **{k: v for k, v in record.items() if k != "text"}}
            return TraceRequest.from_json(record, **defaults)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    return read_lines(path, parse, strict=strict)


def json_fields() -> list[str]:
    """The fields of the JSON form."""
    names = [*PROMPT_FIELDS, *ROOT_OPTIONS, *(each.name for each in fields(TraceRequest))]
    return [name for name in dict.fromkeys(names) if name not in ("prompt", "about")]


def _checked_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the JSON form with their types checked. Fields of other programs are kept as labels."""
    known = json_fields()
    record: dict[str, Any] = {}
    labels: dict[str, Any] = {}
    for name, value in data.items():
        if name in known:
            if value is not None or name == "max_firings":
                record[name] = value
            continue
        meant = get_close_matches(name, known, n=1, cutoff=0.75)
        if meant and meant[0] not in data and name != "label":
            raise InputError(f"unknown field {brief(name)}. Did you mean {meant[0]!r}?")
        if not isinstance(value, (str, int, float, bool)):
            raise InputError(f"unknown field {brief(name)}. A request has {', '.join(known)}.")
        labels[name] = value if isinstance(value, str) else json.dumps(value)
    given: Any = record.get("labels", {})
    if not isinstance(given, Mapping):
        raise InputError(f"'labels' must be an object of texts, got {shown(given)}.")
    if labels or given:
        record["labels"] = labels | {str(key): value for key, value in given.items()}
    _check_types(record)
    return record


def _check_types(record: dict[str, Any]) -> None:
    """What each field of the JSON form may hold."""
    if type(record.get("id")) is int:
        record["id"] = str(record["id"])
    text, tokens = record.get("text"), record.get("tokens")
    if "text" in record and not (isinstance(text, str) and text):
        raise InputError(f"'text' must be a string that is not empty, got {shown(text)}.")
    if "tokens" in record and not _ids(tokens):
        raise InputError(f"'tokens' must be a list of token ids, like [1, 2, 3], got {shown(tokens)}.")
    messages: Any = record.get("messages")
    if "messages" in record and not (
        isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages)
    ):
        raise InputError(
            f"'messages' must be a list of messages, each with a role and content, got {shown(messages)}."
        )
    for name in ("answer", "wrong"):
        value: Any = record.get(name)
        several: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        if name in record and not (
            several and all((isinstance(each, str) and each) or _ids([each]) for each in several)
        ):
            raise InputError(
                f"{name!r} must be text, a token id, or a list of them, none empty, got {shown(value)}."
            )
    other: Any = record.get("counterfactual")
    if "counterfactual" in record and not _prompts(other):
        raise InputError(
            f"'counterfactual' must be text or a list of token ids, or a list of either, not empty, got {shown(other)}."
        )
    options: Any = record.get("method_options", {})
    if not isinstance(options, Mapping):
        raise InputError(f"'method_options' must be an object, like {{\"tau\": 0.3}}, got {shown(options)}.")
    roles: Any = record.get("roles", {})
    if not isinstance(roles, Mapping):
        raise InputError(f"'roles' must be an object from names to positions, got {shown(roles)}.")


def _prompts(value: Any) -> bool:
    """Text, token ids, or several of either."""
    if _ids(value) or (isinstance(value, str) and value):
        return True
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(_ids(each) or (isinstance(each, str) and each) for each in value)
    )


def _ids(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(type(token) is int and 0 <= token <= LARGEST for token in value)
    )


def _root_from_json(data: Mapping[str, Any]) -> Root:
    kind = data.get("kind")
    if kind not in ROOTS:
        raise InputError(f"root.kind: expected one of {', '.join(ROOTS)}, got {shown(kind)}.")
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return cast("Any", ROOTS[str(kind)])(**plain)


def _merged(options: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The options with what a prompt says itself in front; only one of them says what the root is."""
    rooted = [name for name in ("root", *ROOT_OPTIONS) if name in own]
    root = options.get("root")
    if rooted and root is not None and not isinstance(root, str):
        raise InputError(f"The root {root!r} already says what to explain: leave out {', '.join(rooted)}.")
    kind = root or next((kind for kind in ("direction", "heads") if kind in options), None)
    if kind in ROOTS and "root" not in own:
        own = {name: v for name, v in own.items() if name not in ROOT_OPTIONS or name in ROOTS[kind].options}
    elif rooted:
        options = {
            name: v for name, v in options.items() if name not in ROOT_OPTIONS or name in ("answer", "wrong")
        }
    return {**options, **own}


def _plain(value: Any) -> Any:
    """Lists as tuples, so that a request is frozen through and through; tensors as numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(_plain(each) for each in cast("Sequence[Any]", value)) if isinstance(value, list) else value


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_jsonable(each) for each in cast("tuple[Any, ...]", value)]
    if isinstance(value, Mapping):
        return {key: _jsonable(each) for key, each in cast("Mapping[Any, Any]", value).items()}
    return value
