"""The desk's app: a researcher, who has shards of the documents searched and ranked, and a writer."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from pathlib import Path

from examples.research_desk.documents import Documents, find_documents, read_document
from examples.research_desk.passages import split
from examples.research_desk.ranking import Finding, Ranking, find, topic_words
from examples.research_desk.ranking import rank as rank_findings
from examples.research_desk.report import Citation, Report, cite, sections, sections_around
from examples.research_desk.thinking import add_thinkers
from weft import AgentContext, App, Reject

SHARDS = 6
"""Searches that run at once; each shard of the documents is one tool call."""
ENGINE_SHARDS = 48
"""Of a large collection: enough that no worker of an engine is idle while another has much left."""

app = App("research-desk", version="1")
add_thinkers(app)


@dataclass(frozen=True)
class Job:
    """What the researcher is asked for."""

    topic: str
    folder: str = ""
    """Absolute: the tools read the files there. Empty: `DESK_DOCS`, or where the tool-handler was started."""
    suffixes: tuple[str, ...] = ()
    """Only files that end so; empty: all that hold text."""
    pause_seconds: float = 0.0
    """How much longer each search takes, to watch the desk at work, or to kill something meanwhile."""
    on_engine: bool = False
    """Whether an engine searches, and not tools: for collections that keep processors busy for seconds. Which engine is
    the task's `conf.engine`."""
    with_model: bool = False
    """Whether a model plans the search and writes. In the job: an agent's code must not ask the environment."""


@dataclass(frozen=True)
class Facts:
    """What the writer is asked to write about."""

    topic: str
    ranking: Ranking
    looked_for: str = ""
    """The words that were looked for; empty: those of the topic."""
    with_model: bool = False


def folder_named(folder: str) -> Path:
    """Where a tool reads. Only tools ask: an agent's code must be the same wherever it is replayed."""
    return Path(folder or os.environ.get("DESK_DOCS") or ".")


@app.tool
def list_documents(folder: str, suffixes: list[str]) -> Documents:
    """The documents of a folder."""
    place = folder_named(folder).absolute()
    return replace(find_documents(place, suffixes), folder=str(place))


@app.tool
async def search(folder: str, paths: list[str], words: list[str], pause_seconds: float = 0.0) -> Finding:
    """The passages of these documents that hold some of the words."""
    await asyncio.sleep(pause_seconds)
    # Documents are read one by one, in a thread: another call goes on meanwhile.
    return await asyncio.to_thread(
        find, words, ((path, split(read_document(folder_named(folder) / path))) for path in paths)
    )


@app.engine_function(timeout_seconds=600)
def find_in_shard(paths: list[str], folder: str, words: list[str]) -> Finding:
    """As `search`, where processors are what it takes."""
    return find(words, ((path, split(read_document(folder_named(folder) / path))) for path in paths))


@app.engine_function
def rank(words: list[str], findings: list[Finding]) -> Ranking:
    """The best passages of all shards."""
    return rank_findings(words, findings)


@app.agent("researcher")
async def researcher(ctx: AgentContext, job: Job | str) -> Report:
    """A job, or just a topic: then what can be read of the default folder is searched."""
    if isinstance(job, str):
        job = Job(job, suffixes=(".md", ".rst", ".txt"))
    if not topic_words(job.topic):
        raise Reject(f"the topic {job.topic!r} holds no word to look for")
    looked_for = job.topic
    if job.with_model:
        plan = await ctx.agent("planner", job.topic)
        looked_for = " ".join([job.topic, *plan["words"]])
    words = topic_words(looked_for)
    documents = await ctx.tool(list_documents, folder=job.folder, suffixes=list(job.suffixes))
    paths: list[str] = documents["paths"]
    if not paths:
        raise Reject(f"there are no text documents in {job.folder or 'the default folder'}")
    wanted = ENGINE_SHARDS if job.on_engine else SHARDS
    shards = [paths[first::wanted] for first in range(min(wanted, len(paths)))]
    await ctx.emit(
        {
            "documents": len(paths),
            "skipped": documents["skipped"],
            "more": documents["more"],
            "shards": len(shards),
        }
    )

    async def searched(number: int, shard: list[str]) -> dict[str, object]:
        found: dict[str, object] = await ctx.tool(
            search, folder=documents["folder"], paths=shard, words=words, pause_seconds=job.pause_seconds
        )
        await ctx.emit({"shard": number, "passages": found["passages"], "matching": found["matching"]})
        return found

    if job.on_engine:
        findings = await ctx.engine().map(find_in_shard, shards, folder=documents["folder"], words=words)
    else:
        findings = await ctx.gather(*(searched(number, shard) for number, shard in enumerate(shards, start=1)))
    best = await ctx.engine("local").call(rank, words=words, findings=findings)
    facts = {"topic": job.topic, "ranking": best, "looked_for": looked_for, "with_model": job.with_model}
    report: Report = await ctx.agent(writer, facts)
    return report


@app.agent("writer")
async def writer(ctx: AgentContext, facts: Facts) -> Report:
    looked_for = facts.looked_for or facts.topic
    citations: list[Citation] = cite(looked_for, facts.ranking)
    if facts.with_model and citations:
        return await written(ctx, facts, looked_for, citations)
    text = ""
    for section in sections(facts.topic, facts.ranking, citations, looked_for):
        await ctx.emit(section)
        text += section
    return Report(facts.topic, text, citations)


async def written(ctx: AgentContext, facts: Facts, looked_for: str, citations: list[Citation]) -> Report:
    """The report with a middle part by the editor, whose words reach the client while the model says them."""
    before, after = sections_around(facts.topic, facts.ranking, citations, looked_for)
    await ctx.emit(before)
    passages = [{"number": one.number, "place": one.place, "text": one.quote} for one in citations]
    said: str = await ctx.agent("editor", {"topic": facts.topic, "passages": passages})
    await ctx.emit(after)
    return Report(facts.topic, before + said + after, citations)
