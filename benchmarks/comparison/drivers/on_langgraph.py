"""LangGraph: a graph of agent, tool and agent in one process; checkpoints in memory, or in a SQLite file.

`python -m benchmarks.comparison.drivers.on_langgraph memory|sqlite`
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypedDict

import uvloop
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph

from benchmarks.driver import serve
from benchmarks.question import found


class State(TypedDict, total=False):
    question: str
    result: str
    answer: str


async def agent(state: State) -> State:
    return {"answer": state["result"]} if "result" in state else {}


async def tool(state: State) -> State:
    return {"result": found(state["question"])}


def after_agent(state: State) -> str:
    return END if "answer" in state else "tool"


@contextlib.asynccontextmanager
async def saver(kind: str) -> AsyncIterator[BaseCheckpointSaver]:
    if kind == "memory":
        yield InMemorySaver()
    else:
        async with AsyncSqliteSaver.from_conn_string(str(Path(os.environ["WEFT_BENCH_FOLDER"]) / "graph.db")) as store:
            yield store


async def main(kind: str) -> None:
    graph = StateGraph(State)
    graph.add_node("agent", agent)
    graph.add_node("tool", tool)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", after_agent)
    graph.add_edge("tool", "agent")
    async with saver(kind) as store:
        compiled = graph.compile(checkpointer=store)

        async def ask(text: str) -> object:
            done = await compiled.ainvoke({"question": text}, {"configurable": {"thread_id": uuid.uuid4().hex}})
            return done["answer"]

        await serve(ask)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
