"""A mechanism as a drawing: tokens at the bottom, the answer on top, steps as cards in rows between them.

The drawing is one SVG without scripts or styles from elsewhere. Colours are CSS variables with a default, so that a
page can show it in light and dark; cards, arrows and tokens carry ``data-step`` and ``data-token`` for whoever wants to
light them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from unicodedata import east_asian_width
from xml.sax.saxutils import escape, quoteattr

from headtrace.mechanism.mechanism import Mechanism
from headtrace.mechanism.parts import Arrow, Step
from headtrace.mechanism.rules import LOOKING, MLPS
from headtrace.mechanism.sentence import heads_phrase, works_against
from headtrace.mechanism.steps import LEAST_LINE
from headtrace.vocabulary import LEFT_TO_RIGHT, is_right_to_left, visible

CARD, GAP, ROW_GAP = 264, 18, 62
MOST_CARDS = 4
"""Cards beside each other, where there is room."""
PAD = 12
TITLE, SMALL, WORD_TEXT, ROOT_TEXT = 14, 11.5, 12.5, 16
"""Sizes of text in pixels; semi-bold text is about 8 % wider than plain."""
SHORT_TOKENS = 40
"""Longer prompts show the tokens that take part, at most with one more on either side."""
CLEARANCE = 9
"""Pixels between a line that rises to the answer and the cards that it passes."""
TOKEN_ROW, WORD = 26, 18
"""Pixels between rows of tokens, where one row has no room for all of them; letters of a token that are shown."""


@dataclass
class _Box:
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


def text_width(text: str, size: float) -> float:
    """At most how wide text is in the usual sans-serif fonts."""
    narrow = sum(c in " \u00a0.,:;'|!ijlt()[]" for c in text)
    wide = sum(c in "MWmw%@" for c in text)
    square = sum(east_asian_width(c) in ("W", "F") for c in text)
    return size * (0.63 * (len(text) - narrow - wide - square) + 0.36 * narrow + 0.95 * wide + 1.3 * square)


def wrapped(text: str, width: float, size: float) -> list[str]:
    """Text in lines that fit a width."""
    lines, line = list[str](), ""
    for word in text.split(" "):
        longer = f"{line} {word}".strip()
        if line and text_width(longer, size) > width:
            lines.append(line)
            line = word
        else:
            line = longer
    return [*lines, line]


def natural_width(mechanism: Mechanism) -> int:
    """How wide the drawing has to be for every stage, and the tokens of a short prompt, to stand in one row."""
    stages = [step.stage for step in mechanism.steps if not step.hidden]
    most = max((stages.count(stage) for stage in stages), default=1)
    cards = -(-most // -(-most // MOST_CARDS))  # of a stage that takes two rows, half
    n = len(mechanism.circuit.prompt.tokens)
    words = _token_rows(mechanism, range(n), float("inf"))[0] if n <= SHORT_TOKENS else []
    return round(max(cards * (CARD + GAP), 3 * (CARD + GAP), sum(wide for *_, wide in words) + GAP))


def to_svg(mechanism: Mechanism, width: int) -> str:
    """The drawing as text, so many pixels wide."""
    steps = [step for step in mechanism.steps if not step.hidden]
    cards = {step.id: _card_lines(step) for step in steps}
    rows = _rows(steps, max(1, int((width + GAP) // (CARD + GAP))))
    boxes: dict[int, _Box] = {}
    y = 64.0 + ROW_GAP
    for place, row in reversed(list(enumerate(rows))):
        tall = max(_height(cards[step.id]) for step in row)
        x = (width - len(row) * CARD - (len(row) - 1) * GAP) / 2
        below = rows[place - 1] if place else []
        speaking = any(step.role not in LOOKING for step in below)
        if speaking and (len(row) - len(below)) % 2 == 0 and x >= (CARD + GAP) / 2:
            # Over the gaps of the row below, whose lines to the answer pass between these cards.
            x += (CARD + GAP) / 2
        elif len(row) == 1 and works_against(row[0]) and len(rows) > 1:
            x = min(x + CARD + GAP, width - CARD)  # beside what is for the answer, not in its way
        for step in row:
            boxes[step.id] = _Box(x, y, CARD, _height(cards[step.id]))
            x += CARD + GAP
        y += tall + ROW_GAP
    tokens = _tokens(mechanism, y, width)
    # As wide as the cards: what speaks to the answer goes straight up to it.
    wide = min(width - 2.0, max(380, text_width(_root_text(mechanism), 1.08 * ROOT_TEXT) + 40))
    ends = [end for box in boxes.values() for end in (box.x, box.x + box.width)]
    half = max([wide / 2, *(abs(end - width / 2) for end in ends)])
    root = _Box(width / 2 - half, 12, 2 * half, 46)
    height = max([y, *(box.y for box, _ in tokens.values())]) + 52
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" role="img" '
        f'font-family="system-ui, sans-serif" aria-label={quoteattr(_plain(mechanism.sentence))}>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" '
        'markerUnits="userSpaceOnUse" markerWidth="10" markerHeight="10" orient="auto">'
        '<path d="M0,0.5 L8,4 L0,7.5 z" fill="var(--muted, #667)"/></marker></defs>',
        '<rect width="100%" height="100%" fill="var(--paper, #fff)"/>',  # a picture on a dark page stays readable
    ]
    arrows = [arrow for arrow in mechanism.arrows if arrow.shown]
    sign = -1.0 if mechanism.whole < 0 else 1.0  # red is what works against the whole change
    parts += _token_lines(arrows, sign, boxes, {place: box for place, (box, _) in tokens.items()})
    parts += _root_arrows(steps, mechanism.whole, boxes, root)
    parts += _step_arrows(arrows, sign, boxes)
    parts += [_card(step, boxes[step.id], cards[step.id]) for step in steps]
    parts += [_token(place, box, text) for place, (box, text) in tokens.items()]
    parts.append(_root(mechanism, root))
    return "".join([*parts, "</svg>"])


def _plain(text: str) -> str:
    """Text in which tokens stand between quotation marks instead of stars."""
    parts = text.split("*")
    return "".join(part if i % 2 == 0 else f"\u201c{part}\u201d" for i, part in enumerate(parts))


def _rows(steps: Sequence[Step], most: int) -> list[list[Step]]:
    """Steps of one stage beside each other, the lowest first; a stage that is too wide takes two rows."""
    rows: list[list[Step]] = []
    for stage in sorted({step.stage for step in steps}):
        mine = [step for step in steps if step.stage == stage]
        mine.sort(key=lambda step: (works_against(step), step.dest or 0, step.src or 0, step.id))
        count = -(-len(mine) // most)
        size = -(-len(mine) // count)
        rows += [mine[i : i + size] for i in range(0, len(mine), size)]
    return rows


# -- cards ---------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A line of a card."""

    text: str
    size: float
    weight: str
    colour: str
    struck: bool = False


def _card_lines(step: Step) -> list[_Line]:
    """The lines of a card."""
    title = _plain(step.title)
    room = CARD - 2 * PAD - 26
    lines = [
        _Line(line, TITLE, "600", "--ink, #1c1f24")
        for line in wrapped(title[:1].upper() + title[1:], room, 1.08 * TITLE)
    ]
    names = heads_phrase(step, 5)
    if names:
        found = wrapped(names, CARD - 2 * PAD, SMALL)
        lines += [_Line(line, SMALL, "400", "--muted, #5a616b") for line in found]
    amount = f"{step.root:+.2f} to the answer"
    if abs(step.root) < 0.005:
        amount = f"carries {step.flow:+.2f}"
    elif step.role != MLPS:
        amount += f", {step.flow:+.2f} in all"
    lines += [_Line(line, SMALL, "400", "--ink, #1c1f24") for line in wrapped(amount, CARD - 2 * PAD, SMALL)]
    return lines + [
        _Line(line, SMALL, "400", "--ink, #1c1f24", struck)
        for badge, struck in _badge(step)
        for line in wrapped(badge, CARD - 2 * PAD, SMALL)
    ]


def _badge(step: Step) -> list[tuple[str, bool]]:
    """What was measured, and whether it is struck through because it is no evidence for the step."""
    if step.measured is None:
        return [("○ not measured", False)]
    numbers = f"removed: {step.measured.before:.2f} → {step.measured.without:.2f}"
    random = step.measured.random
    numbers += " (no\u00a0control)" if random is None else f" (random\u00a0{random:.2f})"
    if step.doubt is None:
        return [(f"● {numbers}", False)]
    return [(f"○ {step.doubt_text}", False), (numbers, True)]


def _height(lines: Sequence[_Line]) -> float:
    return 2 * PAD + sum(line.size + 5 for line in lines)


def _card(step: Step, box: _Box, lines: Sequence[_Line]) -> str:
    edge = "var(--against, #c0392b)" if works_against(step) else "var(--for, #1f6fb2)"
    dashed = ' stroke-dasharray="5 4"' if step.doubt is not None else ""
    found = [
        f'<g class="card" data-step="{step.id}" tabindex="0" role="button" '
        f"aria-label={quoteattr(f'Step {step.id}: {_plain(step.title)}')}>"
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="8" '
        f'fill="var(--card, #fff)" stroke="{edge}" stroke-width="1.5"{dashed}/>'
        f'<circle cx="{box.x + box.width - PAD - 6:.1f}" cy="{box.y + PAD + 8:.1f}" r="11" fill="{edge}"/>'
        f'<text x="{box.x + box.width - PAD - 6:.1f}" y="{box.y + PAD + 12.5:.1f}" text-anchor="middle" '
        f'font-size="13" font-weight="700" fill="var(--paper, #fff)">{step.id}</text>'
    ]
    y = box.y + PAD
    for text, size, weight, colour, struck in lines:
        y += size + 5
        line = ' text-decoration="line-through"' if struck else ""
        found.append(
            f'<text x="{box.x + PAD:.1f}" y="{y - 5:.1f}" font-size="{size}" font-weight="{weight}"{line} '
            f'fill="var({colour})">{escape(text)}</text>'
        )
    return "".join([*found, "</g>"])


# -- tokens and the answer -----------------------------------------------------------------------------------


def involved_tokens(mechanism: Mechanism) -> list[int]:
    """Positions that shown steps read, write to, or take from directly."""
    steps = [step for step in mechanism.steps if not step.hidden]
    ids = {step.id for step in steps}
    found = {place for step in steps for head in step.heads for place in (head.dest, head.src)}
    found |= {arrow.token for arrow in mechanism.arrows if arrow.token is not None and arrow.target in ids}
    found |= {step.dest for step in steps if step.dest is not None}
    return sorted(found)


def _tokens(mechanism: Mechanism, y: float, width: float) -> dict[int, tuple[_Box, str]]:
    """Tokens from left to right. Where there is no room for all of them in a row, those that take part with their
    neighbours, or those alone; where there is not for these either, more rows."""
    n, part = len(mechanism.circuit.prompt.tokens), involved_tokens(mechanism)
    near = sorted({place + by for place in part for by in (-1, 0, 1) if 0 <= place + by < n})
    choices = [near, part] if n > SHORT_TOKENS else [list(range(n)), near, part]
    rows = min((_token_rows(mechanism, shown, width) for shown in choices), key=len)
    found = dict[int, tuple[_Box, str]]()
    for n_row, row in enumerate(rows):
        x = (width - sum(each for *_, each in row)) / 2
        for place, word, wide in row:
            found[place] = (_Box(x, y + n_row * TOKEN_ROW, wide, 30), word)
            x += wide
    return found


def _token_rows(
    mechanism: Mechanism, shown: Sequence[int], width: float
) -> list[list[tuple[int, str, float]]]:
    """Places, words and widths of tokens in rows; what is left out between two is counted, at a place below zero."""
    rows: list[list[tuple[int, str, float]]] = [[]]

    def put(place: int, word: str) -> None:
        wide = text_width(word, WORD_TEXT) + 16
        if rows[-1] and sum(each for *_, each in rows[-1]) + wide > width:
            rows.append([])
        rows[-1].append((place, word, wide))

    for before, place in zip([-1, *shown], shown, strict=False):
        if place - before > 1:
            put(-place - 1, f"… {place - before - 1} …")
        word = visible(mechanism.circuit.prompt.tokens[place])
        put(place, word if len(word) <= WORD else word[: WORD - 1] + "…")
    return rows


def _token(place: int, box: _Box, word: str) -> str:
    attributes = f'data-token="{place}"' if place >= 0 else ""
    return (
        f'<g class="token" {attributes}><text x="{box.middle:.1f}" y="{box.y + 20:.1f}" text-anchor="middle" '
        f'font-size="{WORD_TEXT}" fill="var(--ink, #1c1f24)" stroke="var(--paper, #fff)" stroke-width="4" '
        f'paint-order="stroke">{escape(word)}</text></g>'
    )


def _root_text(mechanism: Mechanism) -> str:
    question = mechanism.question
    # Behind a word that is set from right to left, a number would be set so too, and change places with its quote.
    mark = LEFT_TO_RIGHT if is_right_to_left(question) else ""
    return f"{question if len(question) <= 90 else question[:89] + '…'} {mark}{mechanism.whole:+.2f}"


def _root(mechanism: Mechanism, box: _Box) -> str:
    text = _root_text(mechanism)
    return (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="23" '
        f'fill="var(--ink, #1c1f24)"/><text x="{box.middle:.1f}" y="{box.y + 29:.1f}" text-anchor="middle" '
        f'font-size="{ROOT_TEXT}" font-weight="600" fill="var(--paper, #fff)">{escape(text)}</text>'
    )


# -- lines ---------------------------------------------------------------------------------------------------


def _on_curve(x1: float, y1: float, x2: float, y2: float, t: float) -> tuple[float, float]:
    """The point of ``_curve`` between the same ends at ``t`` from 0 to 1."""
    bend = (y1 - y2) * 0.45
    parts = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3
    return (
        (parts[0] + parts[1]) * x1 + (parts[2] + parts[3]) * x2,
        parts[0] * y1 + parts[1] * (y1 - bend) + parts[2] * (y2 + bend) + parts[3] * y2,
    )


def _curve(x1: float, y1: float, x2: float, y2: float, serves: float, extra: str, dash: str = "") -> str:
    """A line from below to above; ``serves`` is negative for what works against the whole change."""
    bend = (y1 - y2) * 0.45
    style = f' stroke-dasharray="{dash}"' if dash else ""
    colour = "var(--against, #c0392b)" if serves < 0 else "var(--muted, #667)"
    return (
        f'<path d="M{x1:.1f},{y1:.1f} C{x1:.1f},{y1 - bend:.1f} {x2:.1f},{y2 + bend:.1f} {x2:.1f},{y2:.1f}" '
        f'fill="none" stroke="{colour}"{style} {extra}/>'
    )


DASHES = {"query": "5 4", "key": "1.5 3"}


def _token_lines(
    arrows: Sequence[Arrow], sign: float, boxes: dict[int, _Box], tokens: dict[int, _Box]
) -> list[str]:
    found: list[str] = []
    for arrow in arrows:
        if arrow.token is None or arrow.target not in boxes or arrow.token not in tokens:
            continue
        box, word = boxes[arrow.target], tokens[arrow.token]
        extra = f'stroke-width="1" opacity="0.55" data-step="{arrow.target}" data-token="{arrow.token}"'
        found.append(
            _curve(
                word.middle,
                word.y,
                box.middle,
                box.y + box.height,
                sign * arrow.flow,
                extra,
                DASHES.get(arrow.side, ""),
            )
        )
    return found


def _step_arrows(arrows: Sequence[Arrow], sign: float, boxes: dict[int, _Box]) -> list[str]:
    lines: list[str] = []
    labels: list[_Box] = list(boxes.values())
    texts: list[str] = []
    strongest = max((abs(arrow.flow) for arrow in arrows if arrow.step is not None), default=1.0)
    leaving: dict[int, int] = {}
    for arrow in arrows:
        if arrow.step is None or arrow.step not in boxes or arrow.target not in boxes:
            continue
        low, high = boxes[arrow.step], boxes[arrow.target]
        if low.y < high.y + high.height:
            continue  # beside each other: the frame of arrows has it
        place = leaving[arrow.step] = leaving.get(arrow.step, -1) + 1
        x1 = low.middle + (-1) ** place * 22 * ((place + 1) // 2)
        wide = 1.2 + 3 * abs(arrow.flow) / strongest
        extra = f'stroke-width="{wide:.1f}" marker-end="url(#tip)" data-from="{arrow.step}" data-step="{arrow.target}"'
        x2, y2 = high.middle, high.y + high.height + 3
        lines.append(_curve(x1, low.y, x2, y2, sign * arrow.flow, extra, DASHES.get(arrow.side, "")))
        text = f"{arrow.words} {arrow.flow:+.2f}"
        size = text_width(text, SMALL)
        for share in (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8):
            x, y = _on_curve(x1, low.y, x2, y2, share)
            box = _Box(x - size / 2 - 3, y - 9, size + 6, 17)
            if not any(_overlap(box, other) for other in labels):
                labels.append(box)
                ends = f'data-from="{arrow.step}" data-step="{arrow.target}"'
                texts.append(
                    f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="4" '
                    f'fill="var(--paper, #fff)" {ends}/>'
                    f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" font-size="{SMALL}" '
                    f'fill="var(--ink, #1c1f24)" {ends}>{escape(text)}</text>'
                )
                break
    return lines + texts


def _overlap(one: _Box, two: _Box) -> bool:
    return (
        one.x < two.x + two.width
        and two.x < one.x + one.width
        and one.y < two.y + two.height
        and two.y < one.y + one.height
    )


def _root_arrows(steps: Sequence[Step], whole: float, boxes: dict[int, _Box], root: _Box) -> list[str]:
    """Lines from what speaks to the answer, straight up beside the cards above it where that leaves room."""
    least = LEAST_LINE * abs(whole)
    speaking = [step for step in steps if step.role not in LOOKING and abs(step.root) > least]
    strongest = max((abs(step.root) for step in speaking), default=1.0)
    found: list[str] = []
    for step in speaking:
        box = boxes[step.id]
        above = [other for other in boxes.values() if other.y < box.y]
        x = _clear(box, above)
        wide = 1.2 + 3 * abs(step.root) / strongest
        extra = f'stroke-width="{wide:.1f}" opacity="0.8" data-step="{step.id}"'
        top = min(max(x, root.x + 24), root.x + root.width - 24)
        found.append(_curve(x, box.y, top, root.y + root.height + 2, step.root * whole, extra))
    return found


def _clear(box: _Box, above: Sequence[_Box]) -> float:
    """Where on a card's upper edge a line can rise without passing behind the cards above it: as near to the middle as
    that goes, or in the middle where it goes nowhere."""
    edges = [
        box.middle,
        *(end for each in above for end in (each.x - CLEARANCE, each.x + each.width + CLEARANCE)),
    ]
    free = [
        x
        for x in edges
        if box.x + PAD <= x <= box.x + box.width - PAD
        and not any(each.x - CLEARANCE < x < each.x + each.width + CLEARANCE for each in above)
    ]
    return min(free, key=lambda x: abs(x - box.middle), default=box.middle)
