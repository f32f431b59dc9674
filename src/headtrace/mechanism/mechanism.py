"""A circuit that a person can read: steps with names and measurements, arrows, a ledger that closes, a sentence.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> found = headtrace.why(model, "When Mary and John went to the store, John gave a drink to", budget=40)
>>> found.question
'"Mary" rather than "John"'
>>> abs(sum(line.amount for line in found.ledger) - found.whole) < 1e-3 * abs(found.whole)
True
>>> len(found.steps) <= 7 and found.sentence.endswith(".")
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headtrace.circuits import Circuit
from headtrace.circuits.files import from_json, to_json
from headtrace.circuits.summary import continued, shortened
from headtrace.errors import InputError
from headtrace.mechanism.backbone import fold_circuit
from headtrace.mechanism.parts import Arrow, Clause, LedgerLine, MechanismTest, Step
from headtrace.mechanism.rules import answer_words, favoured_words, is_continued
from headtrace.mechanism.sentence import heads_phrase, make_clauses
from headtrace.mechanism.steps import (
    NOT_SHOWN,
    Reading,
    join_steps,
    make_ledger,
    make_steps,
)
from headtrace.tables import html_table, paragraph
from headtrace.validation import Text, checked, document, fail, file_text, parse, plain, read_object
from headtrace.vocabulary import LEFT_TO_RIGHT, is_right_to_left, ordinal, visible
from headtrace.writing import write_text

if TYPE_CHECKING:
    import polars as pl

SCHEMA = "headtrace.mechanism/1"
MOST_WORDS = 4
"""Of a prompt to compare with: so many changed words are listed; with more, the prompt itself is."""
CANCELS = 10.0
"""A step that carries more than so many times the whole difference is cancelled by others."""
LEFT = 0.3
"""If the steps leave out more than this share of the whole, a note says how much."""
ONE_TOKEN = (
    "A prompt of one token gives heads nothing to choose from, so no step is told: give a longer prompt, or ask what "
    "the model's components write here (a complete circuit)."
)
NO_STEP = (
    "No head carries enough of it to be named: compare with a prompt that changes the answer more, or look at the "
    "circuit itself."
)


@checked
class Mechanism:
    """What a circuit does, in at most seven steps. Made by `headtrace.why` or `Circuit.mechanism`."""

    circuit: Circuit
    """The circuit that it reads."""
    steps: tuple[Step, ...]
    """From what notices something in the prompt up to what speaks to the answer."""
    arrows: tuple[Arrow, ...]
    """What flows between steps, then from tokens into steps; the strongest first; those that are not drawn last."""
    ledger: tuple[LedgerLine, ...]
    """What comes straight into the root; the lines add up to `whole`."""
    whole: float
    """J - J', what changed the root's number between the runs; J where the circuit is of one run."""
    test: MechanismTest | None = None
    """All shown heads together, removed and kept alone; none where nothing was measured."""
    chosen: tuple[Text, ...] = ()
    """What headtrace chose itself: the answer, its rival, the prompts to compare with."""

    @property
    def question(self) -> str:
        """The answer and its rival in words."""
        return self.circuit.root.question(lambda token: f'"{visible(token)}"')

    @property
    def clauses(self) -> tuple[Clause, ...]:
        """The sentence, clause by clause, each with the step that it speaks of."""
        if not self.steps:
            one = len(self.circuit.prompt.tokens) == 1
            return (Clause(ONE_TOKEN if one else self.circuit.reason or NO_STEP),)
        root = self.circuit.root
        favoured = favoured_words(*answer_words(root), self.whole, is_continued(root))
        return make_clauses(self.steps, self.circuit.prompt.tokens, favoured)

    @property
    def sentence(self) -> str:
        """What the circuit does. Tokens of the prompt stand between stars."""
        return " ".join(clause.text for clause in self.clauses)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know before the steps: what was chosen, which token decides between answers of several,
        whether the answer flips, and whether the steps cancel."""
        compared = self.circuit.difference
        found = [*self.chosen, *continued(self.circuit.root)]
        found += [compared.note] if compared is not None and compared.note else []
        if compared is not None and self.whole < 0 and self.steps:
            found.append(self._lost)
        unshown = sum(line.amount for line in self.ledger if line.step is None)
        if self.steps and abs(unshown) > LEFT * abs(self.whole):
            found.append(
                f"Of the {self.whole:+.2f}, {unshown:+.2f} comes from components that no step shows."
            )
        most = max((step.flow for step in self.steps), key=abs, default=0.0)
        if abs(most) > CANCELS * abs(self.whole):
            found.append(
                f"Flows of up to {most:+.2f} cancel to {self.whole:+.2f}, so the steps say little: compare with a "
                "prompt that changes the answer more."
            )
        return tuple(found)

    @property
    def _lost(self) -> str:
        """What a reader should know where the prompts that were compared with favour the answer more."""
        root = self.circuit.root
        answer, wrong = answer_words(root)
        one = favoured_words(answer, wrong, 1.0, is_continued(root)).replace("*", "")
        other = f"for {favoured_words(answer, wrong, -1.0)}" if wrong else f"against {one}"
        return (
            f"The changed prompts favour {one} more than this one does, so the steps tell what speaks {other} here: "
            "their numbers are negative."
        ).replace("*", "")

    @property
    def verdict(self) -> str:
        """How many of the shown steps their removal bears out, in a few words."""
        steps = [step for step in self.steps if not step.hidden]
        measured = [step for step in steps if step.measured is not None]
        if not measured:
            return "not measured" if steps else "no steps"
        held = sum(step.doubt is None for step in measured)
        if held == len(steps):
            return f"all {held} steps confirmed" if held > 1 else "confirmed"
        return f"{held} of {len(steps)} steps confirmed"

    @property
    def shown(self) -> float:
        """The share of the whole that the shown steps bring straight into the root."""
        rest = sum(line.amount for line in self.ledger if line.step is None)
        return 1 - rest / self.whole if self.whole else 0.0

    def step(self, which: int) -> Step:
        """A step by its number."""
        found = next((step for step in self.steps if step.id == which), None)
        if found is None:
            raise InputError(f"There is no step {which}: this mechanism has {len(self.steps)}.")
        return found

    # Changing what is shown

    def rename(self, which: int, name: str) -> Mechanism:
        """The same mechanism with another name for a step; it is kept in the file."""
        return self._with(replace(self.step(which), name=name))

    def hide(self, which: int) -> Mechanism:
        """The same mechanism without a step in its views; the step stays in the file and in the ledger."""
        return self._with(replace(self.step(which), hidden=True))

    def merge(self, first: int, second: int, name: str | None = None) -> Mechanism:
        """The same mechanism with two steps as one, under the number of the first; it is kept in the file.

        Its flow is what enters both from outside, and the ledger still adds up. What the model does without both
        together was not measured: the badge is hollow.
        """
        one, two = self.step(first), self.step(second)
        if first == second:
            raise InputError(f"Step {first} cannot be merged with itself: name two steps.")
        if not one.heads or not two.heads:
            raise InputError("The MLPs are a step of their own: merge two steps of heads.")
        pair = {first, second}
        inside = [a for a in self.arrows if a.step in pair and a.target in pair]
        strong, weak = sorted((one, two), key=lambda step: -abs(step.flow))
        merged = replace(
            join_steps(strong, weak, sum(arrow.flow for arrow in inside), self.circuit.prompt.tokens),
            id=first,
            stage=max(one.stage, two.stage),
            measured=None,
            name=name,
        )
        arrows: dict[tuple[int | None, int | None, int, str], Arrow] = {}
        for each in self.arrows:
            if each not in inside:
                step = first if each.step == second else each.step
                target = first if each.target == second else each.target
                key = (step, each.token, target, each.side)
                before = arrows.get(key, replace(each, step=step, target=target, flow=0.0, through_mlps=0.0))
                arrows[key] = replace(
                    before,
                    flow=before.flow + each.flow,
                    through_mlps=before.through_mlps + each.through_mlps,
                    shown=before.shown or each.shown,
                )
        steps = tuple(merged if step.id == first else step for step in self.steps if step.id != second)
        lines = [line for line in self.ledger if line.step not in pair and line.text != NOT_SHOWN]
        lines.append(LedgerLine(merged.title, merged.root, first))
        lines.append(LedgerLine(NOT_SHOWN, self.whole - sum(line.amount for line in lines)))
        return replace(self, steps=steps, arrows=tuple(arrows.values()), ledger=tuple(lines))

    def with_roles(self, roles: Mapping[tuple[int, int], Sequence[object]]) -> Mechanism:
        """The same mechanism with what its heads do over a corpus, by layer and head: as
        `headtrace.interpret.head_roles` or `Atlas.roles` tell it. A role is a number over a corpus, and says nothing of
        this prompt."""
        steps = tuple(
            replace(
                step,
                heads=tuple(
                    replace(head, roles=tuple(map(str, roles.get((head.layer, head.head), ()))))
                    for head in step.heads
                ),
            )
            for step in self.steps
        )
        return replace(self, steps=steps)

    @property
    def _roles_text(self) -> str | None:
        """What is known of the shown heads over a corpus, in one line."""
        known = {
            head.name: ", ".join(head.roles)
            for step in self.steps
            if not step.hidden
            for head in step.heads
            if head.roles
        }
        said = "; ".join(f"{name} {roles}" for name, roles in known.items())
        return f"Over a corpus: {said}" if known else None

    def _with(self, changed: Step) -> Mechanism:
        return replace(self, steps=tuple(changed if step.id == changed.id else step for step in self.steps))

    # Showing

    @property
    def origin(self) -> str:
        """What was compared, in one line."""
        compared, measure = self.circuit.difference, self.circuit.root.measure
        if compared is None:
            return f"{measure} {self.whole:.2f}, one run"
        own = self.circuit.prompt.text
        changes = ", ".join(
            _in_order(shortened(each.change or _changed_words(own, each.text))) for each in compared.prompts
        )
        mean = " on average" if len(compared.prompts) > 1 else ""
        return (
            f"{measure} {compared.value:.2f}; {compared.other_value:.2f}{mean} with {changes}: "
            f"a difference of {self.whole:+.2f}"
        )

    def summary(self) -> str:
        """The sentence, the steps with their measurements, and the ledger: one terminal screen."""
        prompt = self.circuit.prompt
        lines = [shortened(prompt.text or " ".join(prompt.tokens)), f"Why {self.question}? ({self.origin})"]
        lines += [f"  {note}" for note in self.notes]
        lines += ["", self.sentence]
        if self.steps:
            lines += [
                "",
                "Steps: what each carries in all, what it puts straight into the answer, and what removing it does",
            ]
        for step in self.steps:
            if step.hidden:
                continue
            straight = f"{step.root:+7.2f}" if step.root else " " * 7
            lines.append(
                f"  {step.id}  {step.flow:+7.2f} {straight}  {step.title}  [{heads_phrase(step, 6)}]  {step.badge}"
            )
        if self._roles_text is not None:
            lines += ["", self._roles_text]
        lines += ["", self.ledger_text]
        if self.test is not None:
            test = self.test
            with_some = f"; {self.measured_with}" if self.measured_with else ""
            lines.append(
                f"All shown heads removed: {test.before:.2f} -> {test.without:.2f} (random heads "
                f"{test.random_without:.2f}); kept alone: {test.kept:.2f} (random heads {test.random_kept:.2f}, none "
                f"{test.other:.2f}){with_some}"
            )
        return "\n".join(lines)

    @property
    def measured_with(self) -> str:
        """With how many of the changed prompts the steps were measured, in words; empty if with all."""
        compared, test = self.circuit.difference, self.test
        if compared is None or test is None or test.pairs in (None, len(compared.prompts)):
            return ""
        return f"measured, like the steps, with {test.pairs} of the {len(compared.prompts)} changed prompts"

    @property
    def ledger_text(self) -> str:
        """The ledger in one line: what comes straight into the answer, and its sum."""
        terms = [
            f"{round(line.amount, 2) + 0.0:+.2f} ({'step ' + str(line.step) if line.step is not None else line.text})"
            for line in self.ledger
        ]
        return f"Straight into the answer: {' '.join(terms)} = {self.whole:+.2f}"

    def __repr__(self) -> str:
        return f"Mechanism({self.question}: {len(self.steps)} steps, {self.whole:+.2f})"

    def frame(self, of: str = "steps") -> pl.DataFrame:
        """A row per step; or, with ``of``, per ``"heads"``, ``"arrows"`` or ``"ledger"`` line."""
        import polars as pl

        if of == "heads":
            rows = [
                {"step": step.id, "role": step.role, **_flat(head, leave="looks")}
                for step in self.steps
                for head in step.heads
            ]
        elif of == "arrows":
            rows = [_flat(arrow) | {"words": arrow.words} for arrow in self.arrows]
        elif of == "ledger":
            rows = [_flat(line) for line in self.ledger]
        elif of == "steps":
            rows = self.step_rows()
        else:
            raise InputError(f"of={of!r}: choose steps, heads, arrows or ledger.")
        return pl.DataFrame(rows, infer_schema_length=None)

    def step_rows(self) -> list[dict[str, Any]]:
        """A row per step: what ``frame()`` shows."""
        return [_step_row(step) for step in self.steps]

    def _repr_html_(self) -> str:
        rows = [
            (
                step.id,
                step.title,
                heads_phrase(step, 6),
                step.flow,
                step.badge,
            )
            for step in self.steps
            if not step.hidden
        ]
        titles = ("", "step", "heads", "flow", "measured")
        return (
            paragraph(self.origin, bold=f"Why {self.question}?")
            + paragraph(self.sentence)
            + html_table(titles, rows)
            + paragraph(self.ledger_text)
        )

    def to_markdown(self) -> str:
        """The mechanism as Markdown: the sentence, a table of steps, the ledger."""
        prompt = self.circuit.prompt
        lines = [f"**Why {self.question}?** {prompt.text or ' '.join(prompt.tokens)}", "", self.sentence, ""]
        lines += ["| | step | heads | flow | measured |", "|---|---|---|---|---|"]
        for step in self.steps:
            if not step.hidden:
                title = step.title.replace("|", "\\|")
                lines.append(
                    f"| {step.id} | {title} | {heads_phrase(step, 6)} | {step.flow:+.2f} | {_doubted(step)} |"
                )
        if self._roles_text is not None:
            lines += ["", self._roles_text]
        return "\n".join([*lines, "", self.ledger_text, "", f"({self.origin})", ""])

    def to_html(self, path: str | Path) -> Path:
        """Write the page: the mechanism first, then the circuit as a graph and a table, in one file."""
        from headtrace.explorer.page import write_page

        return write_page(self.circuit, path, mechanism=self)

    def to_svg(self, width: int = 1120) -> str:
        """The drawing, so many pixels wide: tokens at the bottom, steps as cards, the answer on top."""
        from headtrace.mechanism.drawing import to_svg

        return to_svg(self, width)

    def save(self, path: str | Path) -> Path:
        """Write the mechanism and its circuit as one JSON file (`headtrace.load_mechanism` reads it)."""
        return write_text(path, document(mechanism_json(self)))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, as the file has it."""
        return mechanism_json(self)


def _changed_words(text: str | None, other: str | None) -> str:
    """What a prompt that somebody gave changes: its words, if it has as many, or the prompt itself.

    >>> _changed_words("When Mary met John", "When Mary met Anna")
    "'John' -> 'Anna'"
    >>> _changed_words("John met Mary, and John went", "John met Mary, and Mary went")
    "second 'John' -> 'Mary'"
    """
    if other is None:
        return "another prompt"
    one, two = (text or "").split(), other.split()
    one, two = ([word.strip(".,") for word in words] for words in (one, two))
    changed = [place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b]
    if len(one) != len(two) or not 0 < len(changed) <= MOST_WORDS:
        return other

    def which(place: int) -> str:
        word = one[place]
        return f"{ordinal(one[: place + 1].count(word))} " if one.count(word) > 1 else ""

    return " and ".join(f"{which(place)}{one[place]!r} -> {two[place]!r}" for place in changed)


def _in_order(change: str) -> str:
    """A change of words whose arrow points from the old to the new one, also where these are set from right to left."""
    if not is_right_to_left(change):
        return change
    before, arrow, after = change.partition(" -> ")
    return f"{LEFT_TO_RIGHT}{before}{LEFT_TO_RIGHT}{arrow}{after}{LEFT_TO_RIGHT}"


def _doubted(step: Step) -> str:
    """A badge in Markdown: numbers that are no evidence are struck through."""
    if step.measured is None or step.doubt is None:
        return step.badge
    return f"~~{step.measured.text}~~ {step.doubt}"


def _flat(part: Any, leave: str = "") -> dict[str, Any]:
    found = {name: getattr(part, name) for name in type(part).__dataclass_fields__ if name != leave}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def _step_row(step: Step) -> dict[str, Any]:
    measured = step.measured
    return {
        "step": step.id,
        "stage": step.stage,
        "role": step.role,
        "text": step.title,
        "heads": [f"{head.name} {head.dest}->{head.src}" for head in step.heads],
        "dest": step.dest,
        "src": step.src,
        "flow": step.flow,
        "root": step.root,
        "before": None if measured is None else measured.before,
        "without": None if measured is None else measured.without,
        "random": None if measured is None else measured.random,
        "doubt": step.doubt,
    }


# -- files ---------------------------------------------------------------------------------------------------


def mechanism_json(mechanism: Mechanism) -> dict[str, Any]:
    """The mechanism as JSON data: what it says first, the circuit last."""
    data = plain(mechanism)
    data.pop("circuit")
    for step, row in zip(mechanism.steps, data.get("steps", ()), strict=True):
        row["doubt"] = step.doubt
    said = {"question": mechanism.question, "sentence": mechanism.sentence}
    return {"schema": SCHEMA, **said, **data, "circuit": to_json(mechanism.circuit)}


def load_mechanism(path: str | Path) -> Mechanism:
    """Read a mechanism file. For a damaged file, the error names the field."""
    text = file_text(path, "a mechanism file", f"`headtrace why ... --out {path}` writes one.")
    try:
        return mechanism_from_json(parse(text, "a mechanism file"))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def mechanism_from_json(data: Any) -> Mechanism:
    """A mechanism from the data of its file. What it says is checked against its own steps."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        fail("schema", f'"{SCHEMA}"', data.get("schema") if isinstance(data, dict) else data)
    fields = {key: value for key, value in data.items() if key not in ("schema", "sentence", "question")}
    fields["circuit"] = from_json(fields.get("circuit"))
    if isinstance(rows := fields.get("steps"), list):  # what follows from a step's own numbers is not read
        fields["steps"] = [_without_doubt(row) for row in cast("list[Any]", rows)]
    found = read_object(Mechanism, fields)
    total = sum(line.amount for line in found.ledger)
    if abs(total - found.whole) > 1e-6 * max(1.0, abs(found.whole)):
        raise InputError(f"ledger: its lines add up to {total:.6g}, but whole is {found.whole:.6g}")
    ids = {step.id for step in found.steps}
    for place, arrow in enumerate(found.arrows):
        if arrow.target not in ids or (arrow.step is not None and arrow.step not in ids):
            raise InputError(f"arrows[{place}]: names a step that does not exist")
    return found


def _without_doubt(row: Any) -> Any:
    return {key: value for key, value in row.items() if key != "doubt"} if isinstance(row, dict) else row


# -- from a circuit ------------------------------------------------------------------------------------------


def of_circuit(circuit: Circuit) -> Mechanism:
    """The mechanism of a circuit as it stands in its file, without the model: nothing of it is measured anew."""
    backbone = fold_circuit(circuit)
    steps, arrows = make_steps(circuit, backbone, Reading.of_circuit(circuit))
    return Mechanism(circuit, steps, arrows, make_ledger(backbone, steps), backbone.whole)


def save_as(mechanism: Mechanism, path: str | Path) -> Path:
    """Write a mechanism in the form that the path's ending names."""
    forms = {
        ".json": mechanism.save,
        ".html": mechanism.to_html,
        ".md": lambda to: write_text(to, mechanism.to_markdown()),
        ".svg": lambda to: write_text(to, mechanism.to_svg()),
    }
    form = forms.get(Path(path).suffix.lower())
    if form is None:
        raise InputError(f"{path}: end its name in {', '.join(forms)}.")
    return form(path)
