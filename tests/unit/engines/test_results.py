"""Results of engine functions: large ones in a blob store, and the results of a map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime_core.engines.protocol import Error, Outcome, Registered, StepInfo, Value
from runtime_core.engines.remote import run_items, run_registered
from runtime_core.engines.results import Reference, Results, items_of, map_outcome, with_errors
from runtime_core.errors import EngineError

ROOT = Path(__file__).parents[3]


STEP = StepInfo(task="t-1", run="r/2", attempt=3, key="t-1/r/2", deadline=9.5)


def called(name: str, results: Results | None = None, /, **arguments: object) -> Outcome:
    call = Registered("tests.apps.remote_app:app", str(ROOT), name, json.dumps(arguments).encode())
    return run_registered(call, STEP, results or Results())


def value(outcome: Outcome) -> Any:  # Any: JSON
    assert isinstance(outcome, Value), outcome
    return json.loads(outcome.data)


def refused(outcome: Outcome) -> Error:
    assert isinstance(outcome, Error), outcome
    return outcome


def test_a_large_result_goes_to_the_blob_store_and_is_read_where_it_is_an_argument(tmp_path: Path) -> None:
    results = Results(tmp_path.as_uri(), "shop", inline_bytes=1000)
    assert value(called("large", results, count=50)) == "x" * 50
    outcome = called("large", results, count=5000)
    reference = Reference.from_value(value(outcome))
    assert reference is not None
    assert (reference.bytes, reference.format) == (5002, "json")
    assert reference.url.startswith(f"{tmp_path.as_uri()}/shop/t-1/")
    assert reference.load(results.blob_url) == "x" * 5000
    # Named by its content: the next attempt writes it again, and nothing is there twice.
    assert called("large", results, count=5000) == outcome
    assert len(list((tmp_path / "shop" / "t-1").iterdir())) == 1

    assert value(called("size", results, text=reference.to_value())) == 5000
    assert value(called("place", results, where=reference.to_value())) == reference.url
    nested = value(called("echo", Results(results.blob_url), value={"list": [reference.to_value()]}))
    assert nested == {"list": ["x" * 5000]}


def test_a_result_that_is_too_large_is_one_clear_error(tmp_path: Path) -> None:
    error = refused(called("large", count=2_000_000))
    assert (error.cause, error.type, error.retryable) == ("invalid", "ResultTooLarge", False)
    assert error.message == (
        "result: is 2,000,002 bytes of JSON, over the limit of 1,048,576 for a value, and there is no blob store: "
        "set WEFT_BLOB_URL, or return less"
    )
    error = refused(called("large", Results(tmp_path.as_uri(), inline_bytes=10, max_bytes=100), count=200))
    assert error.type == "ResultTooLarge"
    assert error.message == (
        "result: is 202 bytes of JSON, over the limit of 100: raise WEFT_RESULT_MAX_BYTES, or return less"
    )


def test_a_reference_reads_nothing_outside_the_blob_store(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('"secret"')
    store = tmp_path / "blobs"
    store.mkdir()
    for url in (
        secret.as_uri(),
        "secret.json",
        f"{store.as_uri()}/../secret.json",
        f"{store.as_uri()}/%2e%2e/secret.json",
        f"{store.as_uri()}2/a.json",
    ):
        error = refused(called("size", Results(store.as_uri()), text={"weft.reference": url, "bytes": 8}))
        assert (error.cause, error.type) == ("invalid", "InvalidInput")
        assert error.message.startswith(f"arguments.text: {url!r} is outside the blob store")
    error = refused(called("size", text={"weft.reference": secret.as_uri(), "bytes": 8}))
    assert "this process has none" in error.message


def test_a_missing_or_changed_reference_is_reported(tmp_path: Path) -> None:
    results = Results(tmp_path.as_uri(), inline_bytes=10)
    sent = value(called("large", results, count=50))
    [blob] = (tmp_path / "weft" / "t-1").iterdir()
    blob.write_text('"y"')
    assert "its digest differs" in refused(called("size", results, text=sent)).message
    blob.unlink()
    assert "is gone: its retention has ended, or its task was deleted" in refused(
        called("size", results, text=sent)
    ).message  # fmt: skip


def test_the_items_of_a_map_fail_alone() -> None:
    call = Registered("tests.apps.remote_app:app", str(ROOT), "add", b'{"right": 10}')
    outcomes = list(run_items(call, "left", b'[1, "two", 3]', STEP, Results()))
    assert [type(each) for each in outcomes] == [Value, Error, Value]
    items = items_of(outcomes)
    seen = with_errors(value(map_outcome(items, return_exceptions=True)))
    assert isinstance(seen, list)
    assert [seen[0]["sum"], seen[2]["sum"]] == [11, 13]
    assert isinstance(seen[1], EngineError)
    assert seen[1].type == "InvalidInput"
    error = refused(map_outcome(items, return_exceptions=False))
    assert (error.type, error.retryable) == ("InvalidInput", False)
    assert error.message.startswith("item 1: arguments.left: Input should be a valid integer")
    assert error.message.endswith("(1 of 3 failed)")
    unknown = Registered("tests.apps.remote_app:app", str(ROOT), "nothing", b"")
    assert len(list(run_items(unknown, "left", b"[1, 2]", STEP, Results()))) == 2
