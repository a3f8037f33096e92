"""Declarations of engine functions, and the errors of invalid ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from runtime_core.engines.function import MadeOnce
from tests.apps import remote_app
from tests.apps.remote_app import app
from weft import App
from weft.engines import EngineContext, Resources
from weft.errors import ConfigurationError, InvalidInput


def test_the_manifest_says_what_a_function_needs() -> None:
    entries = app.manifest().engine_functions
    assert list(entries)[-5:] == ["rank@2", "alone@7", "Counter", "job", "train"]
    two = entries["rank@2"]
    assert (two.version, two.kind, two.actors) == ("2", "function", 2)
    assert two.resources == {"cpus": 2, "gpus": 1}
    assert entries["add"].resources == {}
    assert (entries["job"].kind, entries["train"].kind) == ("spark_job", "batch_job")
    assert entries["job"].arguments == {
        "additionalProperties": False, "properties": {"table": {"title": "Table", "type": "string"}},
        "required": ["table"], "type": "object",
    }  # fmt: skip
    assert entries["Counter"].description == "Counts its calls."
    assert list((entries["told"].arguments or {})["properties"]) == ["word"]  # type: ignore[call-overload]  # JSON


def test_a_function_is_found_by_its_name_its_version_and_itself() -> None:
    find = app.functions.engine_function
    assert find(remote_app.rank_by_one) is find("rank@1")
    assert find("alone") is find("alone@7")
    assert find(remote_app.Counter) is find("Counter")
    assert find("nothing") is None
    assert find("nothing@1") is None
    for name in ("rank", "rank@3", "add@1"):
        with pytest.raises(ConfigurationError, match=r"several versions|has no version"):
            find(name)
    both = App("both")
    both.engine_function(name="f")(lambda: 1)
    both.engine_function(name="f", version="1")(lambda: 2)
    found = both.functions.engine_function("f")
    assert found is not None
    assert found.name == "f"


def test_a_class_is_one_object_in_each_process() -> None:
    function = app.engine_functions["Counter"]
    first = function.bound(b'{"by": 3}')()
    assert function.bound(b'{"by": 4}')() == first + 4  # type: ignore[operator]  # an int, as its class says
    assert isinstance(function.function, MadeOnce)
    assert pickle.loads(pickle.dumps(function.function)) is function.function


def test_a_function_refuses_engines_that_cannot_run_it() -> None:
    job, train, add = (app.engine_functions[name] for name in ("job", "train", "add"))
    assert not any(add.refusal(engine) for engine in ("local", "ray", "spark"))
    assert not job.refusal("spark")
    assert job.refusal("ray") == (
        "engine function 'job' is a Spark job (its first argument is 'spark'): run it by ctx.engine('spark')"
    )
    assert not train.refusal("ray")
    assert train.refusal("local") == "batch job 'train' is a batch job of Ray: run it by ctx.engine('ray')"
    assert job.bound(b'{"table": "t"}', session=1.5)() == ["t", "float"]


def test_a_batch_job_returns_a_command() -> None:
    train = app.engine_functions["train"]
    assert train.bound(b'{"epochs": 3}')() == ["python", "-m", "train", "3"]
    with pytest.raises(InvalidInput, match=r"^result: \[\] is not a command: return a string, or a list of strings"):
        train.bound(b'{"epochs": 0}')()


def test_an_item_goes_to_the_first_free_argument() -> None:
    add, told, job = (app.engine_functions[name] for name in ("add", "told", "job"))
    assert add.item_argument("", ()) == "left"
    assert add.item_argument("", ["left"]) == "right"
    assert add.item_argument("right", ["left"]) == "right"
    assert told.item_argument("", ()) == "word"
    with pytest.raises(InvalidInput, match="engine function 'job' takes no items: it is a whole job"):
        job.item_argument("", ())
    for over, common in (("nothing", []), ("left", ["left"]), ("", ["left", "right"])):
        with pytest.raises(InvalidInput, match="engine function 'add' has left, right"):
            add.item_argument(over, common)


class NeedsMore:
    def __init__(self, model: str) -> None: ...

    def __call__(self) -> None: ...


class NotCallable: ...


class Waits:
    async def __call__(self) -> None: ...


def _twice(first: EngineContext, second: EngineContext) -> None: ...


def _session(spark: object, table: str) -> None: ...


def _plain() -> None: ...


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda a: a.engine_function(NeedsMore), "is a class that needs 'model': give its arguments"),
        (lambda a: a.engine_function(NotCallable), "give a function, or a class with a method __call__"),
        (lambda a: a.engine_function(Waits), r"'Waits' \(.*\) is async: declare a plain function"),
        (lambda a: a.engine_function(_twice), "takes a EngineContext twice, 'first' and 'second': remove one"),
        (lambda a: a.engine_function(version=2)(_plain), r"has version=2: give a string, such as '2'"),
        (lambda a: a.engine_function(version="a@b")(_plain), "has version='a@b': give a string"),
        (lambda a: a.engine_function(actors=-1)(_plain), "has actors=-1: give a whole number from 0 to 10000"),
        (lambda a: a.engine_function(resources=2)(_plain), r"has resources=2: give Resources\(cpus=2, gpus=1\)"),
        (lambda a: a.engine_function(resources=Resources(gpus=-1))(_plain), "has gpus=-1: give a number of at least 0"),
        (
            lambda a: a.engine_function(resources=Resources(memory_bytes=-1))(_plain),
            "has memory_bytes=-1: give a number",
        ),
        (lambda a: a.engine_function(resources=Resources(custom={"tpu": -1}))(_plain), "has tpu=-1: give a number"),
        (lambda a: a.engine_function(actors=1)(_session), "so it is a Spark job: it runs beside the driver"),
        (lambda a: a.batch_job(_session), "so it is a Spark job: it runs beside the driver"),
        (lambda a: a.batch_job(actors=1)(_plain), r"batch job '_plain' \(.*\) has actors=1"),
    ],
)
def test_an_impossible_declaration_is_refused_with_the_reason(declare: Callable[[App], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        declare(App("test"))
