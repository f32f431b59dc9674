"""How a signal's pairs are split does not depend on the file that it was read from."""

from __future__ import annotations

from dataclasses import replace

from headtrace.interpret.judging import split
from tests.interpret.made_up_signals import same_token, signal_by


def test_a_signal_is_split_alike_whatever_the_hash_of_its_file() -> None:
    examples = signal_by(same_token)
    other = replace(examples, signal=replace(examples.signal, id=f"{examples.signal.id} of another file:3"))
    shown, held = split(examples)
    shown_again, held_again = split(other)
    assert (shown.top, shown.random) == (shown_again.top, shown_again.random)
    assert held == held_again
