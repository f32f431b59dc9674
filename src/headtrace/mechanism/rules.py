"""What a head component does, by an ordered table of rules. Each rule says what it looks at.

The first rule that holds names the component, and the components of one name and place are one step. A package can add
a rule of its own (``RULES.add("name", StepRule(...))``, or an entry point ``headtrace.rules``). Rules are tried by
``order``.

>>> tokens = (" When", " Mary", " and", " John", ",", " John", " said")
>>> facts = Facts(tokens, dest=5, src=3, flow=0.4, whole=8.0)
>>> role(facts), RULES[role(facts)].words(facts)
('finds', 'the second *John* finds the first')
>>> facts = Facts((" a", " b", " c", " a"), dest=3, src=1, flow=0.4, whole=1.0)
>>> role(facts), RULES[role(facts)].words(facts)
('induction', 'the last *a* looks at *b*, the token after the first *a*')
>>> facts = Facts((" a", " b", " a", " c"), dest=2, src=1, flow=0.4, whole=1.0)
>>> role(facts), RULES[role(facts)].words(facts)
('induction', 'the second *a* looks at *b*, the token after the first *a* and before this one')
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headtrace.mechanism.parts import looks_away
from headtrace.registry import Registry
from headtrace.vocabulary import ordinal, visible

MLPS = "mlps"
"""The role of the MLPs at the position of the answer, which no rule names."""
LOOKING = frozenset(("finds", "induction", "previous", "first token", "itself", "carries"))
"""Roles of components that speak to others, not to the root."""
LEAST_ROOT = 0.02
"""A component speaks to the root if it brings at least this share of the whole straight into it."""
BOTH = 0.5
"""A head raises (or lowers) one answer *more than* the other if the other gets more than this share of it, too."""
TOP_RAISED = 5
"""A head raises the token that it reads if that is among so many whose logits it raises most."""


@dataclass(frozen=True)
class Facts:
    """What is known about one head component when it is named."""

    tokens: tuple[str, ...]
    dest: int
    src: int
    flow: float
    """What of the change of the root passes through it."""
    whole: float
    """The whole change of the root."""
    root: float = 0.0
    """What it brings straight into the root."""
    logits: tuple[float, float] | None = None
    """Of that, the flow into the answer's logit and into the wrong answer's."""
    raises: tuple[str, ...] = ()
    """The tokens whose logits its write raises most, the most first."""
    answer: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    continued: bool = False
    """Whether the tokens of the answer are one answer, one after the other, and not alternatives."""
    start: int = 0
    """How many start tokens stand in front of the text."""
    attention: float | None = None
    """Its attention from ``dest`` to ``src``."""
    other_attention: float | None = None
    """... in the prompts that were compared with (their mean)."""
    alone: bool = True
    """Whether all components that are named with it read this one token, not others of the same word."""

    @property
    def speaks(self) -> bool:
        """Whether most of its flow goes straight into the root, and enough of it to be worth a word. Where the two have
        different signs, most of the flow goes elsewhere."""
        enough = abs(self.root) >= max(LEAST_ROOT * abs(self.whole), abs(self.flow) / 2)
        return enough and self.root * self.flow >= 0

    @property
    def sign(self) -> float:
        """+1 if the whole change is for the answer."""
        return 1.0 if self.whole >= 0 else -1.0

    @property
    def favoured(self) -> tuple[str, ...]:
        """What the whole change is for: the answer, or the wrong one where the other prompts favour the answer more."""
        return self.answer if self.sign > 0 else self.wrong

    @property
    def moved(self) -> tuple[float, float]:
        """How far it moves the logit of what the whole change is for, and that of the other; 0 where not known."""
        one, two = self.logits or (0.0, 0.0)
        return (one, two) if self.sign > 0 else (two, one)

    @property
    def raises_more(self) -> bool:
        """Whether it raises what the whole change is for at least as much as it lowers the other; where no logits are
        known, whether there is anything to raise."""
        if self.logits is None:
            return self.sign > 0 or bool(self.wrong)
        for_it, against_it = self.moved
        return for_it >= -against_it

    @property
    def raises_favoured(self) -> bool:
        """Whether it raises the logit of what the whole change is for; true where no logits are known."""
        return self.logits is None or self.moved[0] > 0

    @property
    def looks_away(self) -> bool:
        """Whether its part in the difference is that it does not look here, as it does in the other prompts."""
        return looks_away(self.attention, self.other_attention)

    def same(self, one: str, two: str) -> bool:
        """Whether two tokens are the same word, but for spaces and capitals."""
        return bool(one.strip()) and one.strip().lower() == two.strip().lower()

    def earlier(self, position: int) -> int | None:
        """The last earlier position of the same token."""
        found = [i for i in range(position) if self.same(self.tokens[i], self.tokens[position])]
        return found[-1] if found else None


@dataclass(frozen=True)
class StepRule:
    """A name for what a head component does."""

    order: float
    """Rules are tried from the smallest on."""
    holds: Callable[[Facts], bool]
    words: Callable[[Facts], str]
    """What it does, as a clause: tokens stand between stars."""
    looks_at: str
    """What the rule looks at: the measurement behind the name."""
    by: str = "place"
    """Which components make one step: those of one destination and source (``place``), of one destination and source
    word (``word``), or of one destination (``dest``)."""


def starred(token: str) -> str:
    """A token between stars, which mark tokens in every text; a star of its own becomes another sign.

    >>> starred(" Mary"), starred("**")
    ('*Mary*', '*∗∗*')
    """
    return f"*{visible(token).replace('*', chr(0x2217))}*"


def token_phrase(tokens: tuple[str, ...], position: int) -> str:
    """A token in words: ``*Mary*``, or ``the second *John*`` where it occurs more than once, or ``the last *to*``.

    >>> tokens = (" John", " to", " John", " to")
    >>> token_phrase(tokens, 2), token_phrase(tokens, 3), token_phrase(tokens[:2], 1)
    ('the second *John*', 'the last *to*', '*to*')
    """
    word = tokens[position]
    places = [i for i, token in enumerate(tokens) if token.strip() == tokens[position].strip()]
    if len(places) < 2:
        return starred(word)
    if position == len(tokens) - 1:
        return f"the last {starred(word)}"
    return f"the {ordinal(places.index(position) + 1)} {starred(word)}"


def _dest(facts: Facts) -> str:
    return token_phrase(facts.tokens, facts.dest)


def _src(facts: Facts) -> str:
    if facts.src == facts.dest:
        return "its own position"
    return token_phrase(facts.tokens, facts.src) if facts.alone else starred(facts.tokens[facts.src])


def _word(words: tuple[str, ...], one: str, many: str, continued: bool = False) -> str:
    """The word that is raised or lowered; of several alternatives no one is named, as all of them count."""
    words = ("".join(words),) if continued and words else words
    different = {word.strip() for word in words}
    return many if len(different) > 1 else starred(words[0]) if words else one


def favoured_words(
    answer: tuple[str, ...], wrong: tuple[str, ...], whole: float, continued: bool = False
) -> str:
    """What the whole change is for, in words. ``continued``: the answer's tokens are one answer.

    >>> favoured_words((" Mary",), (" John",), 2.0), favoured_words((" Mary",), (" John",), -2.0)
    ('*Mary*', '*John*')
    >>> favoured_words(("6", "7"), ("0", "1"), 2.0), favoured_words((" New", " York"), (), 2.0, continued=True)
    ('the answers', '*New York*')
    """
    if whole >= 0:
        return _word(answer, "the answer", "the answers", continued)
    return _word(wrong, "the other answers", "the wrong answers")


def answer_words(root: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tokens of a root's answer and of its wrong answer; none where it has none."""
    answer, wrong = (
        tuple[str, ...](getattr(root, name, None) or ()) for name in ("answer_tokens", "wrong_tokens")
    )
    return answer, wrong


def is_continued(root: object) -> bool:
    """Whether the tokens of a root's answer are one answer, one after the other."""
    return bool(getattr(root, "continuation", False))


def _favoured(facts: Facts) -> str:
    return favoured_words(facts.answer, facts.wrong, facts.whole, facts.continued)


def _disfavoured(facts: Facts) -> str:
    if facts.sign > 0:
        return _word(facts.wrong, "the rival", "the wrong answers")
    return _word(facts.answer, "the answer", "the answers", facts.continued)


def _against(facts: Facts) -> bool:
    return (facts.root if facts.speaks else facts.flow) * facts.sign < 0


def _copies(facts: Facts) -> bool:
    """The token that is read is the one that is raised: what the whole change is for, if that is a word at all."""
    read = facts.tokens[facts.src]
    own = any(facts.same(read, token) for token in facts.raises[:TOP_RAISED])
    if not facts.speaks or facts.src == facts.dest:
        return False
    if not facts.favoured:
        return own
    is_favoured = any(facts.same(read, token) for token in facts.favoured)
    return is_favoured and (facts.raises_more or (own and facts.raises_favoured))


def _raises(facts: Facts) -> str:
    """``raises *he*``, or ``raises *he* more than *she*`` where it raises both."""
    up, other = facts.moved
    words = f"raises {_favoured(facts)}"
    return words if other <= BOTH * up else f"{words} more than {_disfavoured(facts)}"


def _lowers(facts: Facts) -> str:
    """``lowers *she*``, or ``lowers *she* more than *he*`` where it lowers both."""
    other, down = facts.moved
    words = f"lowers {_disfavoured(facts)}"
    return words if other >= BOTH * down else f"{words} more than {_favoured(facts)}"


def _speaking(facts: Facts, does: str) -> str:
    """``*to* reads the second *John* and lowers *John*``, or ``*to* lowers *John* by looking away from ...``."""
    if facts.looks_away:
        return f"{_dest(facts)} {does} by looking away from {_src(facts)}"
    return f"{_dest(facts)} reads {_src(facts)} and {does}"


def _finds(facts: Facts) -> bool:
    return facts.src < facts.dest and facts.same(facts.tokens[facts.src], facts.tokens[facts.dest])


def _follows_earlier(facts: Facts) -> bool:
    return (
        facts.start < facts.src < facts.dest
        and facts.src - 1 != facts.dest
        and facts.same(facts.tokens[facts.src - 1], facts.tokens[facts.dest])
    )


def _looking(facts: Facts, words: str, at: str | None = None) -> str:
    """What a component that speaks to later ones does, unless its part is that it does not look there."""
    does = f"looks away from {at or _src(facts)}" if facts.looks_away else words
    return f"{_dest(facts)} {does}"


def _finding(facts: Facts) -> str:
    """``the second *John* finds the first``."""
    first = _src(facts)
    return _looking(facts, f"finds {first.split(' *')[0] if first.startswith('the ') else first}")


def _induction(facts: Facts) -> str:
    read = f"{_src(facts)}, the token after {token_phrase(facts.tokens, facts.src - 1)}"
    if facts.src == facts.dest - 1:  # which of the two the head goes by cannot be told from here
        read += " and before this one"
    return _looking(facts, f"looks at {read}", read)


RULES: Registry[StepRule] = Registry(
    "rule",
    "headtrace.rules",
    {
        "against": StepRule(
            10,
            _against,
            lambda facts: f"works against {_favoured(facts)} at {_dest(facts)}",
            "its flow (what it brings straight into the root, if that is most of it) has the other sign than the whole",
            by="dest",
        ),
        "copies": StepRule(
            20,
            _copies,
            lambda facts: f"{_dest(facts)} copies {starred(facts.tokens[facts.src])}",
            "the token it reads is the answer, and it raises it: the answer's logit rises at least as much as the "
            f"wrong one's falls, or rises and is among the {TOP_RAISED} that its write raises most. Where no answer "
            f"is a word, the token it reads is among the {TOP_RAISED} that its write raises most",
            by="word",
        ),
        "lowers": StepRule(
            30,
            lambda facts: facts.speaks and not facts.raises_more,
            lambda facts: _speaking(facts, _lowers(facts)),
            "of what it brings straight into the root, more comes from the wrong answer's logit falling than from the "
            "answer's rising",
            by="word",
        ),
        "passes on": StepRule(
            35,
            lambda facts: facts.speaks and facts.src == facts.dest,
            lambda facts: _speaking(facts, _raises(facts)),
            "source and destination are the same position, and it brings something straight into the root",
        ),
        "raises": StepRule(
            40,
            lambda facts: facts.speaks,
            lambda facts: _speaking(facts, _raises(facts)),
            f"it brings at least {LEAST_ROOT:.0%} of the whole straight into the root",
            by="word",
        ),
        "finds": StepRule(
            50, _finds, _finding, "source and destination are the same token, and the source is earlier"
        ),
        "induction": StepRule(
            60, _follows_earlier, _induction, "the token before the source is the same as the destination's"
        ),
        "previous": StepRule(
            70,
            lambda facts: facts.src == facts.dest - 1,
            lambda facts: _looking(facts, f"looks one token back, at {_src(facts)}"),
            "the source is the token before the destination",
        ),
        "first token": StepRule(
            80,
            lambda facts: facts.src == 0 and facts.dest > 0,
            lambda facts: _looking(facts, "looks at the first token", "the first token"),
            "the source is the first token",
            by="dest",
        ),
        "itself": StepRule(
            90,
            lambda facts: facts.src == facts.dest,
            lambda facts: _looking(facts, "is re-encoded in place"),
            "source and destination are the same position: the head reads the token and writes at it, for later heads",
        ),
        "carries": StepRule(
            1000,
            lambda _: True,
            lambda facts: _looking(facts, f"looks at {_src(facts)}"),
            "no other rule holds: it carries something from its source to its destination",
        ),
    },
    lambda thing: isinstance(thing, StepRule),
)


def role(facts: Facts) -> str:
    """The name of the first rule that holds."""
    return next(
        name for name, rule in sorted(RULES.items(), key=lambda item: item[1].order) if rule.holds(facts)
    )
