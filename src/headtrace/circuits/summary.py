"""A circuit in a few lines: text for a terminal, a compact table for a notebook; and what it cannot tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from headtrace.roots import LogitDifference
from headtrace.roots.base import Quote, quoted
from headtrace.vocabulary import ATTENTION_SIDES, FUNCTION_WORDS, SIDES, Side

if TYPE_CHECKING:
    from headtrace.circuits.circuit import Circuit
    from headtrace.circuits.parts import Edge, Node
    from headtrace.roots import Root
    from headtrace.validation import Ids


FROM_THE_ROOT: tuple[Side, ...] = tuple(sorted(SIDES, key=lambda side: side != "root"))
"""The sides in the order in which a circuit is shown: the root first."""


def question(circuit: Circuit, quote: Quote = quoted) -> str:
    """What the circuit explains, in words: ``" Mary" rather than " John"``."""
    return _named(circuit).question(quote)


def _named(circuit: Circuit) -> Root:
    """The root with the text of its tokens, as far as the prompt knows it where the root itself does not."""
    root, known = circuit.root, dict(zip(circuit.prompt.token_ids, circuit.prompt.tokens, strict=False))
    for name in ("answer", "wrong"):
        ids: Ids | None = getattr(root, name, None)
        if ids and getattr(root, f"{name}_tokens") is None:
            root = replace(root, **{f"{name}_tokens": tuple(known.get(i, f"token {i}") for i in ids)})
    return root


def origin(circuit: Circuit) -> str:
    """The model and the method."""
    return f"{circuit.model.name}, {circuit.method.name}"


def size(circuit: Circuit) -> str:
    """How large the circuit is: firings, and why some were not expanded; edges by side; influence kept."""
    sides = Counter(edge.side for edge in circuit.edges)
    by_side = ", ".join(f"{sides[side]} {side}" for side in FROM_THE_ROOT if sides[side])
    against = sum(opposing(circuit, edge) for edge in circuit.edges)
    by_side += f"; {against} opposing" if against else ""
    firings = _firings(circuit) if circuit.difference is None else f"{len(circuit.heads())} head components"
    parts = [
        firings,
        f"{len(circuit.edges)} edges" + (f" ({by_side})" if by_side else ""),
    ]
    if circuit.influence_kept is not None:
        parts.append(f"{share(circuit.influence_kept)} of the influence followed to its end")
    return ", ".join(parts)


def opposing(circuit: Circuit, edge: Edge) -> bool:
    """Whether an edge counts against the root; in a difference circuit, whether it flows against the difference."""
    if circuit.difference is not None:
        return edge.weight * circuit.difference.change < 0
    return edge.side not in ATTENTION_SIDES and edge.weight < 0


def _firings(circuit: Circuit) -> str:
    """How many firings there are, how many of them were expanded, and why the others were not."""
    heads = circuit.heads()
    fates = Counter(_fate(circuit, head) for head in heads if not head.expanded)
    reasons = "; ".join(f"{count} {fate}" for fate, count in fates.most_common())
    parts = [f"{len(heads) - fates.total()} expanded"]
    if reasons:
        parts.append(f"not expanded: {reasons}")
    return f"{len(heads)} firings ({'; '.join(parts)})"


def _fate(circuit: Circuit, head: Node) -> str:
    """Why a firing was not expanded."""
    settings = circuit.method.settings or {}
    if settings.get("paths", "attention") != "attention":
        # What is moved can be followed wherever a head attends, so only influence decides.
        least = settings.get("min_influence")
        if head.influence == 0:
            return "opposing"
        if isinstance(least, (int, float)) and (head.influence or 0.0) < least:
            return "cut by the budget"
    if head.dest == 0:
        return "at the first token, with nothing else to attend to"
    if head.attention is not None and head.threshold is not None and head.attention < head.threshold:
        return "below the attention that counts"
    if circuit.influence_kept in (None, 1.0) or (
        circuit.method.name == "svt" and 0 in (head.src, head.layer)
    ):
        return f"not followed by {circuit.method.name}"  # for a budget would have cut influence, and said so
    return "cut by the budget"


def share(part: float) -> str:
    """A share in per cent that is not rounded to all or nothing.

    >>> share(1.0), share(0.998), share(0.99996), share(0.42), share(0.0001), share(0.0)
    ('100%', '99.8%', 'more than 99.9%', '42.0%', 'less than 0.1%', '0%')
    """
    if part in (0.0, 1.0):
        return f"{part:.0%}"
    if part > 0.999:
        return "more than 99.9%"
    return "less than 0.1%" if part < 0.001 else f"{part:.1%}"


def place(circuit: Circuit, node: Node) -> str:
    """A node with the tokens it sits on: ``L9H6 14->3 (" to" -> " Mary")``."""
    if node.kind == "root":
        return f"Root ({question(circuit)})"
    tokens = f'"{circuit.token(node.dest)}"'
    if node.src is not None:
        tokens += f' -> "{circuit.token(node.src)}"'
    return f"{node.name} ({tokens})"


def channel_text(edge: Edge) -> str:
    """The channels of an edge, as a person would list them; with the flow of each where it is known."""
    if edge.channels is None:
        return ""
    if edge.flows is not None:
        pairs = zip(edge.channels[:3], edge.flows, strict=False)
        return "channels " + ", ".join(f"{channel} ({flow:+.2f})" for channel, flow in pairs)
    return ("channel " if len(edge.channels) == 1 else "channels ") + ", ".join(map(str, edge.channels))


def words_text(edge: Edge) -> str:
    """What an edge says in words, and whether a test bore it out: ``Names. (unsupported, p 0.31)``."""
    if edge.description is None:
        return ""
    return edge.description + ("" if edge.evidence is None else f" ({edge.evidence.verdict})")


def opening(circuit: Circuit) -> str:
    """The prompt and the question, the size of the circuit, and what the tokens contribute."""
    value = "" if circuit.root.value is None else f", {circuit.root.measure} {circuit.root.value:.4g}"
    given = circuit.prompt
    prompt = given.text if given.text is not None else str(list(given.token_ids or given.tokens))
    lines = [
        shortened(prompt),
        f"Why {question(circuit)}? ({circuit.root.kind} root{value}; {origin(circuit)})",
    ]
    lines += continued(circuit.root)
    notice = (circuit.method.settings or {}).get("notice")
    lines += [] if notice is None else [str(notice)]
    lines += _compared(circuit)
    if not circuit.edges:
        return "\n".join([*lines, f"No circuit: {circuit.reason or 'it has no edges'}"])
    return "\n".join([*lines, size(circuit), *_tokens(circuit)])


def continued(root: Root) -> list[str]:
    """Of answers of several tokens: which token decides, and what follows it."""
    if not isinstance(root, LogitDifference) or root.continuations is None or root.log_odds is None:
        return []
    shared = len(root.answer_prefix)
    labels = root.continuation_tokens or tuple(tuple(map(str, each)) for each in root.continuations)
    (one, *_), (other, *_) = (each[shared:] for each in labels)
    rests = root.rest or (0.0, 0.0)
    tails = [
        f"{sign}{abs(rest):.3g} for {quoted(''.join(each[shared + 1 :]))}"
        for each, rest, sign in zip(labels, rests, "-+", strict=True)
        if each[shared + 1 :]
    ]
    whole = f"; with what follows ({', '.join(tails)}), log-odds {root.log_odds:.4g}" if tails else ""
    return [f"They differ first at {quoted(one)} against {quoted(other)}: that is what is explained{whole}."]


def shortened(text: str, most: int = 240) -> str:
    """A long prompt with its middle left out.

    >>> shortened("0123456789" * 3, 20)
    '0123456 [16 characters] 3456789'
    """
    if len(text) <= most:
        return text
    half = (most - 6) // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters] {text[-half:]}"


def _compared(circuit: Circuit) -> list[str]:
    """What a difference circuit compares, and how much of the difference it shows."""
    said = circuit.difference
    if said is None:
        return []
    how = " (found by exchanging words)" if said.automatic else ""
    lines = [f"Compared with{how}:"]
    for other in said.prompts:
        shown = other.text if other.text is not None else str(list(other.token_ids))
        change = "" if other.change is None else f"{other.change}: "
        lines.append(f"  {other.value:+8.4g}  {change}{shown}")
    lines += [] if said.note is None else [said.note]
    mean = "" if len(said.prompts) == 1 else " (mean)"
    other = f"{said.other_value:.4g}" if said.other_value >= 0 else f"({said.other_value:.4g})"
    return [
        *lines,
        f"Difference {said.value:.4g} - {other} = {said.change:.4g}{mean}; edges into the root that are "
        f"shown carry {said.shown:.0%} of the difference",
    ]


def summary(circuit: Circuit) -> str:
    """The whole circuit in about two dozen lines."""
    lines = [opening(circuit)]
    if not circuit.edges:
        return lines[0]
    if circuit.difference is not None:
        return "\n".join([*lines, *_flows(circuit)])
    lines += _seeds(circuit)
    moved = sorted((e for e in circuit.edges if e.side in ("value", "input")), key=lambda e: -abs(amount(e)))
    for title, edges in (("Strongest content:", moved[:8]), ("Strongest signals:", circuit.top(8))):
        if edges:
            lines += ["", title, *(_edge_line(circuit, edge) for edge in edges)]
    if circuit.unexplained:
        lines += ["", f"Unexplained firings: {', '.join(circuit.unexplained[:8])}"]
    if circuit.not_told:
        lines += ["", "Not told:", *(f"  {sentence}" for sentence in circuit.not_told)]
    return "\n".join(lines)


def not_shown(circuit: Circuit, shown: Sequence[Edge]) -> float | None:
    """What is left of the root's value, or of the difference, when some edges into the root are taken away; None where
    contributions do not sum to it."""
    if circuit.difference is not None:
        whole = circuit.difference.change
    elif circuit.root.adds_up and circuit.root.value is not None:
        whole = circuit.root.value
    else:
        return None
    return whole - sum(map(amount, shown))


def _seeds(circuit: Circuit, most: int = 8) -> list[str]:
    """The edges into the root, largest first, and the rest of its value as a line of its own: so the lines add up."""
    seeds = sorted((e for e in circuit.edges if e.side == "root"), key=lambda e: -abs(amount(e)))[:most]
    if not seeds:
        return []
    lines = ["", "Straight into the root:", *(_edge_line(circuit, edge) for edge in seeds)]
    rest = not_shown(circuit, seeds)
    return lines if rest is None or f"{abs(rest):.4f}" == "0.0000" else [*lines, f"  {rest:8.4f}  not shown"]


def _flows(circuit: Circuit) -> list[str]:
    """The largest flows of a difference circuit: into the root, through heads, and on other edges."""
    heads = sorted(circuit.heads(), key=lambda node: -abs(node.flow or 0.0))[:8]
    lines = _seeds(circuit)
    lines += ["", "Through heads (flows of nodes on one path are the same flow, and do not add up):"]
    for head in heads:
        parts = (
            f"moves something else {head.moves or 0.0:+.2f}, attends differently {head.attends or 0.0:+.2f}"
        )
        lines.append(f"  {head.flow or 0.0:8.4f}  {place(circuit, head)}: {parts}")
    others = [edge for edge in circuit.top(len(circuit.edges)) if edge.side != "root"]
    return [*lines, "", "Strongest edges:", *(_edge_line(circuit, edge) for edge in others[:10])]


def _tokens(circuit: Circuit, most: int = 6) -> list[str]:
    """What matters in the prompt: measured where it was; else by attribution, constants and sinks apart."""
    measured, prompt = circuit.prompt.importance, circuit.prompt
    if measured is not None:
        amounts = [0.0 if each is None else each for each in measured]
        title = "What matters (measured: mean loss when the word is exchanged; function words, which break it, last):"
    elif circuit.difference is not None:
        amounts, title = list(circuit.difference.tokens), "By token (flow from what differs):"
    elif prompt.contributions is not None:
        amounts, title = [0.0, *prompt.contributions[1:]], "By token:"
    else:
        return []
    broken = [measured is not None and _breaks_the_sentence(token) for token in prompt.tokens]
    order = sorted(
        (i for i, each in enumerate(amounts) if each), key=lambda i: (broken[i], -abs(amounts[i]), i)
    )[:most]
    lines = ["", title, *(f'  {amounts[i]:+8.4f}  "{circuit.token(i)}" {i}' for i in order)]
    if prompt.contributions is not None:
        rests = f'constants and sinks, which rest on the first token "{circuit.token(0)}"'
        lines.append(f"  {prompt.contributions[0]:+8.4f}  {rests}")
    return lines


def _breaks_the_sentence(token: str) -> bool:
    """Whether exchanging a word says little: a function word, or punctuation."""
    word = token.strip().lower()
    return word in FUNCTION_WORDS or not any(letter.isalnum() for letter in word)


def amount(edge: Edge) -> float:
    """The number of an edge that is shown: attention, or what passes through it in the unit of the root.

    The weight of content that became a signal stands for the signal as well, and has no unit.
    """
    if edge.side in ATTENTION_SIDES or edge.contribution is None:
        return edge.weight
    return edge.contribution


def _edge_line(circuit: Circuit, edge: Edge) -> str:
    text = f"  {amount(edge):8.4f}  {place(circuit, circuit.node(edge.source))}"
    if edge.side != "root":
        channels = channel_text(edge)
        text += f" => {edge.side} of {circuit.node(edge.target)}" + (f", {channels}" if channels else "")
    return text + (" (opposing)" if opposing(circuit, edge) else "")


def edges_table(circuit: Circuit, rows: int = 12) -> str:
    """A small table of the strongest edges; all text escaped."""
    text = escape(shortened(circuit.prompt.text or " ".join(circuit.prompt.tokens)))
    head = (
        f"<p><b>Why {escape(question(circuit))}?</b><br>{text}<br>"
        f"<small>{escape(origin(circuit))}: {escape(size(circuit))}</small></p>"
    )
    if not circuit.edges:
        return f"<div>{head}<p>No circuit: {escape(circuit.reason or 'it has no edges')}</p></div>"
    body = "".join(
        "<tr>"
        + "".join(
            f"<td>{escape(cell)}</td>"
            for cell in (
                place(circuit, circuit.node(edge.source)),
                place(circuit, circuit.node(edge.target)),
                edge.side,
                f"{amount(edge):.4f}",
                channel_text(edge),
            )
        )
        + "</tr>"
        for edge in circuit.top(rows, by="influence")
    )
    titles = "".join(f"<th>{title}</th>" for title in ("from", "to", "side", "weight", "channels"))
    return f"<div>{head}<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"


LISTED = 4
"""Nodes that a sentence names."""
NOTHING = 1e-6
"""Influence of a cause that takes nothing away when it is removed in its turn, but for rounding."""
HELD = 0.01
"""Influence that the biases of MLPs hold, or that was not followed, and that is worth a sentence."""
ASK = 'A difference circuit (paths="difference") may tell what changes it.'


def not_told(circuit: Circuit) -> tuple[str, ...]:
    """Sentences about what a complete circuit leaves open though its content depends on it; none for other circuits.

    - A head below the threshold moves something that matters, but no signal makes it attend there: it attends as it
      would without any, or is held down.
    - A head attends in part, and a component that keeps it from attending far more is named, but was not followed.
    - A component is needed for a query or key together with others, but takes nothing away alone: it is not followed.
    - Biases of MLPs hold a part of the influence: which of their units are on was decided by something else.
    - The budget left a part of the influence unfollowed.
    """
    settings = circuit.method.settings or {}
    if settings.get("paths") != "complete":
        return ()
    weak = [
        f"{node.name} ({node.attention:.2g})"
        for node in circuit.nodes
        if node.kind == "head" and node.expanded and _below(node) and not _attends(circuit, node)
    ]
    idle = [
        node.name
        for node in circuit.nodes
        if node.kind in ("head", "mlp")
        and not node.expanded
        and (node.influence or 0.0) < NOTHING
        and any(edge.side in ATTENTION_SIDES for edge in circuit.edges_from(node))
    ]
    biased = [n for n in circuit.nodes if n.kind == "offset" and n.layer is not None and n.head is None]
    held = sum(node.influence or 0.0 for node in biased)
    held_down = [
        f"{node.name} ({node.attention:.2g}), by {_listed(left)}"
        for node in circuit.nodes
        if node.attention is not None and (left := _not_followed(circuit, node))
    ]
    sentences: list[str] = []
    if held_down:
        sentences.append(
            f"Kept from attending far more, by what is named here and not followed: {_listed(held_down)}. {ASK}"
        )
    if weak:
        sentences.append(f"Why these attend is not told, no signal makes them: {_listed(weak)}. {ASK}")
    if idle:
        sentences.append(
            f"Needed only together with others, so that their own causes are not told: {_listed(idle)}. {ASK}"
        )
    if held > HELD:
        where = _listed([f"MLP {node.layer} @{node.dest}" for node in biased])
        sentences.append(
            f"{held:.0%} of the influence ends at biases ({where}): what turned the units of these MLPs on or off is "
            f"not told. {ASK}"
        )
    kept = 1.0 if circuit.influence_kept is None else circuit.influence_kept
    if (cut := 1 - kept - held) > HELD:
        limits = [
            f"{name}={settings[name]}" for name in ("min_influence", "max_firings") if settings.get(name)
        ]
        where = f" ({', '.join(limits)})" if limits else ""
        sentences.append(
            f"{cut:.0%} of the influence ends at heads and MLPs that the budget did not follow{where}: what these "
            "depend on is not told. A lower min_influence follows them."
        )
    return tuple(sentences)


def _not_followed(circuit: Circuit, node: Node) -> list[str]:
    """What holds a head down and has causes that were not looked for."""
    sources = [circuit.node(e.source) for e in circuit.edges_into(node) if e.side in ATTENTION_SIDES]
    followed = {each.name for each in sources if each.expanded or each.kind not in ("head", "mlp")}
    return [name for name in node.held_down_by or () if name not in followed]


def _below(node: Node) -> bool:
    return node.attention is not None and node.threshold is not None and node.attention < node.threshold


def _attends(circuit: Circuit, node: Node) -> bool:
    """Whether causes of the attention of a head were looked for."""
    return node.predicted is not None or any(e.side in ATTENTION_SIDES for e in circuit.edges_into(node))


def _listed(names: list[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")
