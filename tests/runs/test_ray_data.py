"""The engine of Ray Data on a real Ray of this machine, and what is refused before it starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headtrace
from headtrace.errors import InputError
from headtrace.runs.engines import ShardWorker
from headtrace.runs.work import trace_job
from tests.conftest import IOI
from tests.runs.conftest import assert_same
from tests.runs.killing import Killer
from tests.tiny import tiny_model

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")


def test_two_workers_one_of_them_killed_give_the_circuits_of_the_local_engine(
    model, prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with settings, and of requests that bring a counterfactual or a direction of their own."""
    other = "When Tom and Anna went to the store, Anna gave a drink to"
    others: list[Any] = [
        {"text": IOI, "answer": " Mary", "paths": "difference", "counterfactual": other},
        {"text": IOI, "direction": [0.5] * model.d_model, "layer": 2, "position": -2},
    ]
    given = [*others, *prompts.examples[:22]]
    how: dict[str, Any] = {
        "shard_size": 1,
        "max_firings": 8,
        "method_options": {"tau": 0.3, "ig_steps": 16},
        "patterns": "recompute",
    }
    local = headtrace.run(model, given, out=tmp_path / "local", **how)
    assert local.circuit(0).difference is not None
    from ray.data import DataContext  # which takes long

    # On a busy machine, the first worker would have done everything before the second is there.
    monkeypatch.setattr(DataContext.get_current(), "wait_for_min_actors_s", 300)
    killer = Killer("ShardWorker", tmp_path / "ray" / "shards", of=len(given))
    killer.start()
    run = headtrace.run(model, given, out=tmp_path / "ray", engine="ray", workers=2, **how)
    assert killer.left > 0, "nobody was killed while there was work left"
    assert_same(run, local)


def test_an_address_where_nothing_listens_is_refused_at_once(again) -> None:
    with pytest.raises(InputError, match=r"No Ray answers at '127.0.0.1:1'"):
        again(engine="ray", ray_address="127.0.0.1:1")
    with pytest.raises(InputError, match=r"expected host:port"):
        again(engine="ray", ray_address="somewhere")


def test_without_ray_the_way_to_install_it_is_told(again, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install '\.\[ray\]'"):
        again(engine="ray")


def test_a_model_that_no_worker_could_load_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match=r"no name or folder that a worker could load"):
        headtrace.run(tiny_model("llama"), [[1, 2, 3]], out=tmp_path, engine="ray", top_k=1)


def test_a_method_that_no_worker_could_make_is_refused(model, tmp_path) -> None:
    with pytest.raises(InputError, match=r"take the method by its name"):
        headtrace.run(model, [[1, 2, 3]], out=tmp_path, engine="ray", top_k=1, tau=lambda keys: 0.5)


def test_a_worker_whose_model_has_other_weights_says_so(model, whole) -> None:
    made = {"method": "acc++", "max_firings": 200, "min_influence": None}
    job = trace_job(whole.store, model, made)
    good = ShardWorker(job)({"shard": [0]})
    assert good["problem"] == [""]
    place = {**job.options["model"], "weights_sha256": "0" * 64}
    other = ShardWorker(replace(job, options={**job.options, "model": place}))
    assert "other weights" in other({"shard": [0]})["problem"][0]
