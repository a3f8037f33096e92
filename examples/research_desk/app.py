"""The desk's app: a researcher, which searches and ranks shards of the documents, and a writer."""

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
"""The number of concurrent searches; each shard of the documents is one tool call."""
ENGINE_SHARDS = 48
"""The number of shards of a large collection: enough to keep all workers of an engine busy."""

app = App("research-desk", version="1")
add_thinkers(app)


@dataclass(frozen=True)
class Job:
    """The researcher's input."""

    topic: str
    folder: str = ""
    """The absolute path of the documents. Empty: `DESK_DOCS`, or the tool-handler's working directory."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of the files to search; empty: all text files."""
    pause_seconds: float = 0.0
    """Additional time per search, in seconds, to watch the desk work or to kill a service meanwhile."""
    on_engine: bool = False
    """Whether the engine `conf.engine` searches instead of tools: for collections that take seconds of CPU time."""
    with_model: bool = False
    """Whether a model plans the search and writes; agent code itself must not read the environment."""


@dataclass(frozen=True)
class Facts:
    """The writer's input."""

    topic: str
    ranking: Ranking
    looked_for: str = ""
    """The words that were searched for; empty: those of the topic."""
    with_model: bool = False


def folder_named(folder: str) -> Path:
    """Return the folder that a tool reads. Only tools call this: agent code must not depend on its machine."""
    return Path(folder or os.environ.get("DESK_DOCS") or ".")


@app.tool
def list_documents(folder: str, suffixes: list[str]) -> Documents:
    """List the documents of a folder."""
    place = folder_named(folder).absolute()
    return replace(find_documents(place, suffixes), folder=str(place))


@app.tool
async def search(folder: str, paths: list[str], words: list[str], pause_seconds: float = 0.0) -> Finding:
    """Return the passages of these documents that contain some of the words."""
    await asyncio.sleep(pause_seconds)
    # Read in a thread, one document at a time, so that other calls run meanwhile.
    return await asyncio.to_thread(
        find, words, ((path, split(read_document(folder_named(folder) / path))) for path in paths)
    )


@app.engine_function(timeout_seconds=600)
def find_in_shard(paths: list[str], folder: str, words: list[str]) -> Finding:
    """Do the same as `search`, on an engine."""
    return find(words, ((path, split(read_document(folder_named(folder) / path))) for path in paths))


@app.engine_function
def rank(words: list[str], findings: list[Finding]) -> Ranking:
    """Return the best passages of all shards."""
    return rank_findings(words, findings)


@app.agent("researcher")
async def researcher(ctx: AgentContext, job: Job | str) -> Report:
    """Research a job, or a topic in the default folder."""
    if isinstance(job, str):
        job = Job(job, suffixes=(".md", ".rst", ".txt"))
    if not topic_words(job.topic):
        raise Reject(f"the topic {job.topic!r} contains no word to search for")
    looked_for = job.topic
    if job.with_model:
        plan = await ctx.agent("planner", job.topic)
        looked_for = " ".join([job.topic, *plan["words"]])
    words = topic_words(looked_for)
    documents = await ctx.tool(list_documents, folder=job.folder, suffixes=list(job.suffixes))
    paths = documents.paths
    if not paths:
        raise Reject(f"there are no text documents in {job.folder or 'the default folder'}")
    wanted = ENGINE_SHARDS if job.on_engine else SHARDS
    shards = [paths[first::wanted] for first in range(min(wanted, len(paths)))]
    await ctx.emit(
        {
            "documents": len(paths),
            "skipped": documents.skipped,
            "more": documents.more,
            "shards": len(shards),
        }
    )

    async def searched(number: int, shard: list[str]) -> Finding:
        found = await ctx.tool(
            search, folder=documents.folder, paths=shard, words=words, pause_seconds=job.pause_seconds
        )
        await ctx.emit({"shard": number, "passages": found.passages, "matching": found.matching})
        return found

    if job.on_engine:
        findings = await ctx.engine().map(find_in_shard, shards, folder=documents.folder, words=words)
    else:
        findings = await ctx.gather(*(searched(number, shard) for number, shard in enumerate(shards, start=1)))
    best = await ctx.engine("local").call(rank, words=words, findings=findings)
    facts = Facts(job.topic, best, looked_for, job.with_model)
    return await ctx.agent(writer, facts)


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
    """Return the report with a middle part by the editor, streamed to the client while the model writes it."""
    before, after = sections_around(facts.topic, facts.ranking, citations, looked_for)
    await ctx.emit(before)
    passages = [{"number": one.number, "place": one.place, "text": one.quote} for one in citations]
    said: str = await ctx.agent("editor", {"topic": facts.topic, "passages": passages})
    await ctx.emit(after)
    return Report(facts.topic, before + said + after, citations)
