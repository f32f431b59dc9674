"""What a head component does, by an ordered table of rules. Each rule says what it looks at.

The first rule that holds names the component, and the components of one name and place are one step. A package can add
a rule of its own (``RULES.add("name", StepRule(...))``, or an entry point ``headtrace.rules``). Rules are tried by
``order``.

>>> tokens = (" When", " Mary", " and", " John", ",", " John", " said")
>>> facts = Facts(tokens, dest=5, src=3, flow=0.4, whole=8.0)
>>> role(facts), RULES[role(facts)].words(facts)
('finds', 'the second *John* finds the first')
>>> facts = Facts((" a", " b", " a", " c"), dest=2, src=1, flow=0.4, whole=1.0)
>>> role(facts), RULES[role(facts)].words(facts)
('induction', 'the second *a* looks at *b*, which followed the first')
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headtrace.registry import Registry

LEAST_ROOT = 0.02
"""A component speaks to the root if it brings at least this share of the whole straight into it."""
TOP_RAISED = 5
"""A head copies what it reads if that token is among so many whose logits it raises most."""


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
    start: int = 0
    """How many start tokens stand in front of the text."""

    @property
    def speaks(self) -> bool:
        """Whether most of its flow goes straight into the root, and enough of it to be worth a word."""
        return abs(self.root) >= max(LEAST_ROOT * abs(self.whole), abs(self.flow) / 2)

    @property
    def sign(self) -> float:
        """+1 if the whole change is for the answer."""
        return 1.0 if self.whole >= 0 else -1.0

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


ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


def token_phrase(tokens: tuple[str, ...], position: int) -> str:
    """A token in words: ``*Mary*``, or ``the second *John*`` where it occurs more than once, or ``the last *to*``.

    >>> tokens = (" John", " to", " John", " to")
    >>> token_phrase(tokens, 2), token_phrase(tokens, 3), token_phrase(tokens[:2], 1)
    ('the second *John*', 'the last *to*', '*to*')
    """
    word = tokens[position].strip() or repr(tokens[position])[1:-1]
    places = [i for i, token in enumerate(tokens) if token.strip() == tokens[position].strip()]
    if len(places) < 2:
        return f"*{word}*"
    if position == len(tokens) - 1:
        return f"the last *{word}*"
    number = places.index(position)
    ordinal = ORDINALS[number] if number < len(ORDINALS) else f"{number + 1}th"
    return f"the {ordinal} *{word}*"


def _dest(facts: Facts) -> str:
    return token_phrase(facts.tokens, facts.dest)


def _src(facts: Facts) -> str:
    return token_phrase(facts.tokens, facts.src)


def _word(words: tuple[str, ...], otherwise: str) -> str:
    return f"*{words[0].strip()}*" if words else otherwise


def _against(facts: Facts) -> bool:
    return (facts.root if facts.speaks else facts.flow) * facts.sign < 0


def _copies(facts: Facts) -> bool:
    read = facts.tokens[facts.src]
    own = any(facts.same(read, token) for token in facts.raises[:TOP_RAISED])
    is_answer = any(facts.same(read, token) for token in facts.answer)
    return facts.speaks and facts.src != facts.dest and (own or (is_answer and _for_answer(facts)))


def _for_answer(facts: Facts) -> bool:
    return facts.logits is None or facts.logits[0] >= -facts.logits[1]


def _lowers(facts: Facts) -> bool:
    return facts.speaks and facts.logits is not None and -facts.logits[1] > facts.logits[0]


def _finds(facts: Facts) -> bool:
    return facts.src < facts.dest and facts.same(facts.tokens[facts.src], facts.tokens[facts.dest])


def _follows_earlier(facts: Facts) -> bool:
    return (
        facts.start < facts.src < facts.dest
        and facts.src - 1 != facts.dest
        and facts.same(facts.tokens[facts.src - 1], facts.tokens[facts.dest])
    )


def _found(facts: Facts) -> str:
    """``the second *John* finds the first``."""
    first = _src(facts)
    return f"{_dest(facts)} finds {first.split(' *')[0] if first.startswith('the ') else first}"


def _induction(facts: Facts) -> str:
    earlier = token_phrase(facts.tokens, facts.src - 1).split(" *")[0]
    return f"{_dest(facts)} looks at {_src(facts)}, which followed {earlier}"


RULES: Registry[StepRule] = Registry(
    "rule",
    "headtrace.rules",
    {
        "against": StepRule(
            10,
            _against,
            lambda facts: f"works against {_word(facts.answer, 'the answer')} at {_dest(facts)}",
            "its flow (what it brings straight into the root, if that is most of it) has the other sign than the whole",
            by="dest",
        ),
        "copies": StepRule(
            20,
            _copies,
            lambda facts: f"{_dest(facts)} copies *{facts.tokens[facts.src].strip()}*",
            f"the token it reads is among the {TOP_RAISED} whose logits its write raises most, or it is the answer and "
            "the answer's logit rises more than the wrong one's falls",
            by="word",
        ),
        "lowers": StepRule(
            30,
            _lowers,
            lambda facts: f"{_dest(facts)} reads {_src(facts)} and lowers {_word(facts.wrong, 'the rival')}",
            "of what it brings straight into the root, more comes from the wrong answer's logit falling than from the "
            "answer's rising",
            by="word",
        ),
        "passes on": StepRule(
            35,
            lambda facts: facts.speaks and facts.src == facts.dest,
            lambda facts: f"{_dest(facts)} passes on what was gathered there",
            "source and destination are the same position, and it brings something straight into the root",
        ),
        "raises": StepRule(
            40,
            lambda facts: facts.speaks,
            lambda facts: (
                f"{_dest(facts)} reads {_src(facts)} and raises {_word(facts.answer, 'the answer')}"
            ),
            f"it brings at least {LEAST_ROOT:.0%} of the whole straight into the root",
            by="word",
        ),
        "finds": StepRule(
            50, _finds, _found, "source and destination are the same token, and the source is earlier"
        ),
        "induction": StepRule(
            60, _follows_earlier, _induction, "the token before the source is the same as the destination's"
        ),
        "previous": StepRule(
            70,
            lambda facts: facts.src == facts.dest - 1,
            lambda facts: f"{_dest(facts)} looks one token back, at {_src(facts)}",
            "the source is the token before the destination",
        ),
        "first token": StepRule(
            80,
            lambda facts: facts.src == 0 and facts.dest > 0,
            lambda facts: f"{_dest(facts)} looks at the first token",
            "the source is the first token",
            by="dest",
        ),
        "itself": StepRule(
            90,
            lambda facts: facts.src == facts.dest,
            lambda facts: f"{_dest(facts)} rewrites itself",
            "source and destination are the same position",
        ),
        "carries": StepRule(
            1000,
            lambda _: True,
            lambda facts: f"{_dest(facts)} looks at {_src(facts)}",
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
