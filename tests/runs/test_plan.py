"""From examples to shards: ids, order, what cannot be asked about."""

from __future__ import annotations

import pytest

import headtrace
from headtrace.errors import InputError
from headtrace.runs.plan import make_plan, requests_of
from headtrace.tasks import TaskSet

MARY = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def tracer(model: headtrace.Model) -> headtrace.Tracer:
    return headtrace.Tracer(model)


def test_an_id_is_the_content_of_a_prompt_and_equal_prompts_are_told_apart(tracer) -> None:
    mary = {"text": MARY, "answer": " Mary", "wrong": " John"}
    other = mary | {"answer": " Anna"}
    rows = make_plan(tracer, [mary, other, mary, mary]).table.sort_by("index").to_pylist()
    first = rows[0]["id"]
    assert [row["id"] for row in rows] == [first, rows[1]["id"], f"{first}-1", f"{first}-2"]
    assert rows[1]["id"] != first
    assert make_plan(tracer, [other, mary]).table.sort_by("index").to_pylist()[1]["id"] == first


def test_prompts_of_similar_length_are_together_in_an_order_that_is_always_the_same(tracer, prompts) -> None:
    plan = make_plan(tracer, prompts, shard_size=8)
    rows = plan.table.to_pylist()
    lengths = [len(row["token_ids"]) for row in rows]
    assert lengths == sorted(lengths)
    assert sorted(row["index"] for row in rows) == list(range(30))
    assert plan.info("").shards == 4
    assert plan.info("").sha256 == make_plan(tracer, list(prompts), shard_size=8).info("").sha256


def test_requests_come_back_from_the_plan_as_they_were_made(tracer, prompts: TaskSet) -> None:
    asked = [
        prompts[0],
        {"text": MARY, "answer": [" Mary", " Anna"]},
        {"text": MARY, "answer": " Mary John"},
        {"tokens": [2, 7, 201], "answer": 201, "wrong": [202, 203]},
    ]
    rows = make_plan(tracer, asked).table.sort_by("index").to_pylist()
    assert requests_of(rows, tracer) == [tracer.request(each).resolve(tracer.model) for each in asked]
    heads = make_plan(tracer, [MARY], heads=["L1H2"]).table.to_pylist()
    assert requests_of(heads, tracer) == [tracer.request(MARY, heads=["L1H2"]).resolve(tracer.model)]


def test_plans_without_requests_of_early_versions_give_the_same_tokens_and_roots(tracer, prompts) -> None:
    given = [prompts[0], {"text": MARY, "answer": " Mary John"}, {"text": MARY, "answer": [" Mary", " Anna"]}]
    for options in ({}, {"heads": ["L1H2"]}):
        items = [MARY] if options else given
        table = make_plan(tracer, items, **options).table.sort_by("index")
        now = requests_of(table.to_pylist(), tracer)
        early = requests_of(table.drop_columns(["request"]).to_pylist(), tracer, "complete")
        for one, other in zip(early, now, strict=True):
            assert (one.ids, one.root, one.text) == (other.ids, other.root, other.text)
            assert one.request.paths == "complete"


def test_labels_and_roles_come_along_as_positions_or_as_characters_of_the_text(tracer, prompts) -> None:
    given = {"text": MARY, "answer": " Mary", "labels": {"order": "ABBA"}}
    spans = given | {"roles": {"IO": [5, 9], "S2": [MARY.index("John gave"), MARY.index(" gave")]}}
    (by_text,) = make_plan(tracer, [spans]).table.to_pylist()
    assert (by_text["role:IO"], by_text["role:S2"], by_text["role:end"]) == (2, 10, 14)
    assert by_text["label:order"] == "ABBA"
    (without,) = make_plan(tracer, [spans], bos=False).table.to_pylist()
    assert (without["role:IO"], without["role:end"]) == (1, 13)
    (by_position,) = make_plan(tracer, [given | {"roles": {"IO": 2}}]).table.to_pylist()
    assert by_position["role:IO"] == 2
    row = make_plan(tracer, prompts).table.sort_by("index").to_pylist()[0]
    assert {name: row[f"role:{name}"] for name in prompts[0].roles} == dict(prompts[0].roles)


def test_a_prompt_that_cannot_be_asked_about_is_kept_with_its_problem(tracer) -> None:
    long = {"tokens": [5] * 5000, "answer": 6}
    rows = [
        long,
        {"text": MARY, "answer": " Zorblax"},
        {"text": MARY, "answer": " Mary", "roles": {"IO": 99}},
    ]
    good = {"text": MARY, "answer": " Mary"}
    found = make_plan(tracer, [*rows, good]).table.sort_by("index").to_pylist()
    assert [row["problem"] is None for row in found] == [False, False, False, True]
    assert "5000" in found[0]["problem"]
    assert "Zorblax" in found[1]["problem"]
    assert "99" in found[2]["problem"]
    assert len({row["id"] for row in found}) == 4
    with pytest.raises(InputError, match=r"Prompt 1: .*Zorblax"):
        make_plan(tracer, [good, rows[1]], strict=True)
    with pytest.raises(InputError, match=r"None of the 3 prompts can be traced"):
        make_plan(tracer, rows)


@pytest.mark.parametrize("nothing", [[], ()])
def test_no_prompts_at_all_is_an_error(tracer, nothing) -> None:
    with pytest.raises(InputError, match=r"no prompts"):
        make_plan(tracer, nothing)
