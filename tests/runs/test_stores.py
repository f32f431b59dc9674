"""Object stores: the real S3 protocol against a server on this machine, and what fsspec can write."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem
from pyarrow import fs

import headtrace
from headtrace.circuits import read_circuit
from headtrace.errors import InputError
from headtrace.runs import open_run
from headtrace.runs import store as stores
from headtrace.runs.manifest import shard_file
from headtrace.runs.store import open_store
from tests.runs.conftest import SHARD, assert_same


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"scheme=http&endpoint_override={host}:{port}"
        server.stop()


@pytest.fixture
def bucket(endpoint: str, request: pytest.FixtureRequest) -> str:
    """The URL of a run that is not there yet, in a bucket of the test's own."""
    name = "b" + str(abs(hash(request.node.name)))[:12]
    filesystem, _ = fs.FileSystem.from_uri(f"s3://{name}?{endpoint}&allow_bucket_creation=true")
    filesystem.create_dir(name)
    return f"s3://{name}/runs/ioi?{endpoint}"


@pytest.fixture(autouse=True)
def quick_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "SETTLES", 0.0)


def test_a_run_in_a_bucket_is_that_of_a_folder_and_goes_on_after_a_stop(
    model, prompts, bucket, undisturbed
) -> None:
    def stop(done: int, of: int) -> None:
        if done > SHARD:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        headtrace.run(model, prompts, out=bucket, shard_size=SHARD, progress=stop)
    assert open_run(bucket).status().left == 30 - SHARD
    run = headtrace.run(model, prompts, out=bucket, shard_size=SHARD)
    assert_same(run, undisturbed)
    assert run.circuit(3) == undisturbed.circuit(3)
    assert read_circuit(f"{bucket}#3") == undisturbed.circuit(3)
    assert stores.LEASE not in run.store.sizes()


def test_a_damaged_shard_in_a_bucket_is_traced_again(model, prompts, bucket) -> None:
    some = list(prompts)[:4]
    run = headtrace.run(model, some, out=bucket, shard_size=2)
    name = shard_file(1, "edges")
    content = run.store.read(name)
    run.store.write(name, content[:-20] + bytes(20))
    headtrace.run(model, some, out=bucket, shard_size=2)
    assert run.store.read(name) == content


def test_a_lease_keeps_a_second_run_out_until_its_owner_is_gone(bucket: str) -> None:
    store = open_store(bucket)
    with (
        stores.locked(store),
        pytest.raises(InputError, match=r"Another run is writing"),
        stores.locked(store),
    ):
        pass
    assert stores.LEASE not in store.sizes()
    elsewhere = {"owner": "x", "host": "elsewhere", "pid": 1, "started": 0.0, "renewed": time.time()}
    store.write(stores.LEASE, json.dumps(elsewhere).encode())
    with pytest.raises(InputError, match=r"process 1 on elsewhere.* its lease ends in"), stores.locked(store):
        pass
    store.write(stores.LEASE, json.dumps(elsewhere | {"renewed": time.time() - 2 * stores.EXPIRES}).encode())
    with stores.locked(store):
        assert json.loads(store.read(stores.LEASE))["owner"] != "x"


def test_a_lease_of_a_process_of_this_machine_that_has_ended_is_taken_over_at_once(bucket: str) -> None:
    store = open_store(bucket)
    dead = stores._owner() | {"owner": "x", "started": 1.0, "renewed": time.time()}
    store.write(stores.LEASE, json.dumps(dead).encode())
    with stores.locked(store):
        pass


def test_a_lease_is_renewed_while_the_run_goes_on(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "RENEWED", 0.01)
    store = open_store(bucket)
    with stores.locked(store):
        first = json.loads(store.read(stores.LEASE))["renewed"]
        for _ in range(1000):
            if json.loads(store.read(stores.LEASE))["renewed"] > first:
                return
            time.sleep(0.01)
    pytest.fail("it was not renewed")


def test_a_bucket_that_is_not_there_is_told_before_anything_runs(model, endpoint: str) -> None:
    with pytest.raises(InputError, match=r"bucket does not exist"):
        headtrace.run(model, ["When Mary and"], out=f"s3://nobody-has-this/x?{endpoint}", top_k=1)


def test_a_url_that_nothing_can_write_is_told() -> None:
    with pytest.raises(InputError, match=r"cannot be opened.*nonsense"):
        open_store("nonsense://x/y")
    with pytest.raises(InputError, match=r"cannot be opened.*bad"):
        open_store("s3://bucket/x?bad=1")


class Elsewhere(LocalFileSystem):
    """A file system that only fsspec knows."""

    protocol = "elsewhere"

    def __init__(self, **options: object) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("elsewhere://"))


def test_what_fsspec_can_write_holds_a_run(model, prompts, tmp_path: Path) -> None:
    register_implementation("elsewhere", Elsewhere, clobber=True)
    some = list(prompts)[:3]
    run = headtrace.run(model, some, out=f"elsewhere://{tmp_path}/runs/ioi", shard_size=2)
    assert run.status().done == 3
    assert run.circuit(0).prompt.text == some[0].text


@pytest.mark.parametrize("place", ["memory://runs/ioi", "MEMORY://x", "mock://x"])
def test_a_run_in_memory_is_refused_in_python_as_on_the_command_line(model, prompts, place: str) -> None:
    with pytest.raises(InputError, match=r"lost when it ends.*Give a folder") as error:
        headtrace.run(model, list(prompts)[:1], out=place)
    assert "\n" not in str(error.value)


def test_a_folder_may_be_given_as_a_url(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}/x").folder == tmp_path / "x"
