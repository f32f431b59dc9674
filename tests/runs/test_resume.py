"""Whatever happens to a run, the same call resumes it, and the result is that of an undisturbed one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import headtrace
from headtrace.errors import IdentityError, InputError
from headtrace.prompts import batches
from headtrace.runs import Run, open_run
from headtrace.runs.manifest import shard_file, shard_record
from headtrace.runs.store import checksum, locked, open_store, parquet_bytes
from headtrace.tasks import load_task
from tests.runs.conftest import SHARD, assert_same
from tests.starting import Started


def start(out: str) -> None:
    """A run that says how far it is; for a process of its own."""
    model = headtrace.load("builtin")
    prompts = load_task("ioi", model.tokenizer, n_per_cell=1)
    headtrace.run(model, prompts, out=out, shard_size=SHARD, progress=lambda *far: print(far, flush=True))


def wait_for(process: Started, line: str) -> None:
    for found in process.stdout:
        if found.strip() == line:
            return
    pytest.fail(f"it ended before it said {line}: {process.told()}")


def hold(folder: str) -> None:
    """A lock, held for long."""
    with locked(open_store(folder)):
        print("held", flush=True)
        time.sleep(600)


class _Stop:
    """A progress that ends the run, as Ctrl-C would, when so many prompts are done."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, done: int, of: int) -> None:
        if done >= self.after:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_and_ends_like_an_undisturbed_one(
    again: Callable[..., Run], undisturbed
) -> None:
    for after in (1, 9, 20):
        with pytest.raises(KeyboardInterrupt):
            again(progress=_Stop(after))
    told: list[tuple[int, int]] = []
    assert_same(again(progress=lambda *far: told.append(far)), undisturbed)
    assert told[0] == (16, 30), "two shards were whole"


def test_a_run_that_is_done_traces_nothing_again(again, whole, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headtrace.runs.work.ShardWork.trace", lambda *_: pytest.fail("traced again"))
    assert again().status().done == 30


def test_a_run_that_is_killed_and_started_again_ends_like_an_undisturbed_one(
    tmp_path: Path, undisturbed
) -> None:
    out = tmp_path / "ioi"
    for far in ("(8, 30)", "(24, 30)"):
        process = Started(start, str(out))
        wait_for(process, far)
        process.close()
        assert open_run(out).status().left > 0
    run = headtrace.run(
        "builtin",
        load_task("ioi", headtrace.load("builtin").tokenizer, n_per_cell=1),
        out=out,
        shard_size=SHARD,
    )
    assert_same(run, undisturbed)


def test_a_second_run_is_refused_while_one_is_there_and_not_after_it_was_killed(tmp_path: Path) -> None:
    process = Started(hold, str(tmp_path))
    wait_for(process, "held")
    store = open_store(tmp_path)
    try:
        with (
            pytest.raises(InputError, match=rf"Another run is writing to .*process {process.pid} on"),
            locked(store),
        ):
            pass
    finally:
        process.close()
    with locked(store), pytest.raises(InputError, match=f"process {os.getpid()}"), locked(store):
        pass


def test_another_model_other_options_or_other_prompts_are_refused_by_name(
    again, whole, model, prompts, tmp_path
) -> None:
    cases = {
        'options.paths: "attention" there, "complete" now': {"paths": "complete"},
        'options.method.name: "acc++" there, "svt" now': {"method": "svt"},
        "options.signals: false there, true now": {"signals": True},
        "options.max_firings: 200 there, 5 now": {"max_firings": 5},
        "plan.shard_size: 8 there, 4 now": {"shard_size": 4},
        "seed: 0 there, 7 now": {"seed": 7},
        'options.root.root: null there, "linear" now': {"root": "linear"},
    }
    for told, how in cases.items():
        with pytest.raises(InputError) as error:
            again(**how)
        assert told in str(error.value)
        assert "holds another run" in str(error.value)
    with pytest.raises(InputError, match=r"plan.prompts: 30 there, 3 now"):
        headtrace.run(model, list(prompts)[:3], out=tmp_path / "ioi", shard_size=SHARD, seed=0)
    changed = [*list(prompts)[:29], prompts[0]]
    with pytest.raises(InputError, match=r"prompt 29: .* there, .* now"):
        headtrace.run(model, changed, out=tmp_path / "ioi", shard_size=SHARD, seed=0)


def test_other_weights_of_the_same_name_are_refused(whole, prompts, tmp_path) -> None:
    import torch

    other = headtrace.load("builtin")
    with torch.no_grad():
        next(other.hf.parameters()).mul_(1.01)
    with pytest.raises(InputError, match=r"model\.weights_sha256"):
        headtrace.run(other, prompts, out=tmp_path / "ioi", shard_size=SHARD)


@pytest.mark.parametrize("table", ["prompts", "nodes", "edges"])
def test_a_damaged_shard_is_found_left_out_and_traced_again(
    again, whole, undisturbed, tmp_path, table
) -> None:
    file = tmp_path / "ioi" / shard_file(2, table)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    damaged = open_run(tmp_path / "ioi")
    assert damaged.status().damaged == (2,)
    assert damaged.status().left == SHARD
    assert getattr(damaged, table).collect().height < getattr(undisturbed, table).collect().height
    assert_same(again(), undisturbed)
    assert open_run(tmp_path / "ioi").status().damaged == ()


def test_a_shard_that_lost_a_file_or_its_record_is_traced_again(again, whole, undisturbed, tmp_path) -> None:
    (tmp_path / "ioi" / shard_file(0, "edges")).unlink()
    (tmp_path / "ioi" / shard_record(1)).unlink()
    (tmp_path / "ioi" / shard_record(3)).write_text('{"shard": 3')
    assert open_run(tmp_path / "ioi").status().left == 22
    assert_same(again(), undisturbed)


@pytest.mark.parametrize("field", ["prompts", "failures", "rows"])
def test_a_record_that_its_table_contradicts_is_not_believed(
    again, whole, undisturbed, tmp_path, field: str
) -> None:
    """A count that is one too low was "1 left" for ever."""
    path = tmp_path / "ioi" / shard_record(0)
    record = json.loads(path.read_text())
    if field == "prompts":
        record["prompts"] -= 1
    elif field == "failures":
        record["failures"] = {"input": 1}
    else:
        record["files"]["edges"]["rows"] += 1
    path.write_text(json.dumps(record))
    assert open_run(tmp_path / "ioi").status().damaged == (0,)
    assert_same(again(), undisturbed)
    assert open_run(tmp_path / "ioi").status().left == 0


def test_a_damaged_plan_is_made_again(again, undisturbed, tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt):
        again(progress=_Stop(9))
    (tmp_path / "ioi" / "plan.parquet").write_bytes(b"PAR1")
    assert_same(again(), undisturbed)


def test_what_a_killed_run_left_half_written_is_taken_away(again, undisturbed, tmp_path) -> None:
    (tmp_path / "ioi" / "shards").mkdir(parents=True)
    for name in (".plan.0a1b2c.parquet", "shards/.00001.edges.0a1b2c.parquet"):
        (tmp_path / "ioi" / name).write_bytes(b"half of")
    assert_same(again(), undisturbed)
    assert not list((tmp_path / "ioi").rglob(".*"))


def test_a_batch_that_fails_is_traced_prompt_by_prompt_and_other_batches_once(
    again, undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = headtrace.Tracer.trace_resolved
    sizes: list[int] = []

    def fails(self, requests, progress=None):
        sizes.append(len(requests))
        if any("school" in (each.text or "") for each in requests):
            raise IdentityError("the parts do not add up")
        return kept(self, requests, progress)

    monkeypatch.setattr(headtrace.Tracer, "trace_resolved", fails)
    monkeypatch.setattr("headtrace.request.batches", lambda lengths: batches(lengths, prompts_at_once=2))
    run = again()
    rows = run.prompts.collect()
    failed = rows.filter(rows["status"] == "failed")
    assert failed.height > 0
    assert set(failed["reason"]) == {"identity: the parts do not add up"}
    assert all("school" in text for text in failed["text"])
    assert run.status().failures == {"identity": failed.height}
    assert run.status().done == 30 - failed.height
    assert sizes.count(2) == 15, "batches of two"
    assert sizes.count(1) <= 2 * failed.height, "only the prompts of batches that failed are traced again"


def test_a_run_planned_before_plans_had_requests_is_resumed(again, undisturbed, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        again(progress=_Stop(9))
    folder = tmp_path / "ioi"
    table = pq.read_table(folder / "plan.parquet").drop_columns(["request"])
    content = parquet_bytes(table, SHARD)
    (folder / "plan.parquet").write_bytes(content)
    manifest = json.loads((folder / "run.json").read_text())
    manifest["plan"] |= {"file_sha256": checksum(content), "sha256": "of a plan without requests"}
    (folder / "run.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"holds another run: options.paths"):
        again(paths="complete")
    assert_same(again(), undisturbed)
    assert (folder / "plan.parquet").read_bytes() == content


def test_a_folder_of_other_things_is_left_alone(model, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match=r"holds other files \(thesis.tex\) and is not a run"):
        headtrace.run(model, ["When Mary and"], out=tmp_path, top_k=1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(InputError, match=r"is a file; a run is a folder"):
        headtrace.run(model, ["When Mary and"], out=tmp_path / "thesis.tex", top_k=1)


def test_a_run_of_another_version_is_refused(again, whole, tmp_path: Path) -> None:
    manifest = tmp_path / "ioi" / "run.json"
    said = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(said | {"headtrace": "0.0.1"}))
    with pytest.raises(InputError, match=r'headtrace: "0.0.1" there'):
        again()
    manifest.write_text(json.dumps(said | {"schema": "headtrace.run/2"}))
    with pytest.raises(InputError, match=r"headtrace\.run/2"):
        again()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(model) -> None:
    with pytest.raises(InputError, match=r"cannot be written|cannot be a folder"):
        headtrace.run(model, ["When Mary and"], out="/proc/runs", top_k=1)


def start_on_a_small_disk(out: str) -> None:
    """A run that, from its second shard on, may only write files of a kilobyte: as if the disk were full."""
    import resource
    import signal

    def limit(done: int, of: int) -> None:
        if done > SHARD:  # in the second shard
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing raises an error instead
    model = headtrace.load("builtin")
    try:
        headtrace.run(
            model,
            load_task("ioi", model.tokenizer, n_per_cell=1),
            out=out,
            shard_size=SHARD,
            progress=limit,
        )
    except InputError as error:
        print(error, flush=True)


def test_a_full_disk_is_reported_and_the_run_is_resumed_when_there_is_room(
    again, undisturbed, tmp_path: Path
) -> None:
    pytest.importorskip("resource", reason="no limit on the size of files here")
    process = Started(start_on_a_small_disk, str(tmp_path / "ioi"))
    said = process.stdout.read()
    process.close()
    assert "File too large" in said, said
    assert "8 of 30 prompts are done and kept. The same command resumes" in said
    assert open_run(tmp_path / "ioi").status().left == 22
    assert not list((tmp_path / "ioi").rglob(".*"))
    assert_same(again(), undisturbed)


@pytest.mark.ill_typed
def test_wrong_options_are_refused_before_anything_runs(again) -> None:
    for how, told in (
        ({"engine": "slurm"}, "choose 'local' or 'ray'"),
        ({"ray_address": "127.0.0.1:1"}, "belongs to engine='ray'"),
        ({"engine": "ray", "workers": 0}, "at least one"),
        ({"paths": "all"}, "paths='all'"),
        ({"shard_size": 0}, "at least one prompt"),
    ):
        with pytest.raises(InputError, match=told):
            again(**how)


def test_progress_tells_of_prompts_and_failures_and_never_goes_back(again) -> None:
    told: list[tuple[int, int]] = []
    failed: list[int] = []
    again(progress=lambda *far: told.append(far), failures=failed.append)
    assert told == sorted(told)
    assert told[-1] == (30, 30)
    assert failed[-1] == 0
