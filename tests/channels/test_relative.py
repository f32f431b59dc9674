"""Relative attention, against the mean over the other keys written out key by key."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from headtrace.measures import relative, relative_row

# Quarters add without rounding; what is left is one division by the number of others.
quarters = st.integers(-400, 400).map(lambda i: i / 4)
rows = st.lists(st.tuples(quarters, st.booleans()), min_size=1, max_size=9)


@given(rows, st.data())
def test_it_is_the_value_at_the_source_less_the_mean_over_the_other_visible_keys(row, data) -> None:
    src = data.draw(st.integers(0, len(row) - 1))
    values = torch.tensor([value for value, _ in row], dtype=torch.float64)
    visible = torch.tensor([seen or i == src for i, (_, seen) in enumerate(row)])
    others = [row[i][0] for i in range(len(row)) if visible[i] and i != src]
    expected = row[src][0] - (sum(others) / len(others) if others else 0.0)
    within = len(row) * torch.finfo(torch.float64).eps * 100 * len(row)
    weights = relative_row(visible[None], torch.tensor([src]))
    assert abs(float(weights[0] @ values) - expected) <= within
    assert not weights[0, ~visible].any(), "hidden keys do not count"
    total = values[visible].sum()
    assert abs(float(relative(values[src], total, int(visible.sum()))) - expected) <= within


def test_many_rows_of_many_numbers_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-40, 41, (6, 5, 3), generator=generator).double() / 4
    visible = torch.ones(6, 5, dtype=torch.bool).tril()
    visible[5] = True
    src = torch.tensor([0, 1, 0, 2, 4, 1])
    here = values[torch.arange(6), src]
    total = (values * visible[..., None]).sum(1)
    made = relative(here, total, visible.sum(-1, keepdim=True))
    weights = relative_row(visible, src)
    torch.testing.assert_close(made, torch.einsum("ft,ftn->fn", weights, values))
    assert torch.equal(made[0], here[0]), "with one visible key there is nothing to compare"
    assert relative_row(visible, src, torch.float32).dtype == torch.float32
