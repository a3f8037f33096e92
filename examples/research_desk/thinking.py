"""The agents that a model drives if `DESK_MODEL` names one: a planner of the search, and an editor."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from weft import App, LLMAgent

MODEL = "DESK_MODEL"
"""The model, such as `openai-chat:gpt-x` at OPENAI_BASE_URL; set it for the services and for the submitter."""


@dataclass(frozen=True)
class Plan:
    """The plan of a search."""

    words: Annotated[list[str], Field(min_length=1, max_length=12)]
    """Single words, in addition to those of the topic."""


PLANNER = """\
You plan a search in a folder of documents. You are given a topic. Name up to twelve single words that passages which
answer it are likely to hold: other words for the same, and the terms of the field. Do not repeat words of the topic."""
EDITOR = """\
You write the middle part of a report. You are given a topic and numbered passages as JSON. Say in a few short
paragraphs of Markdown, without a heading, what the passages say of the topic. Say nothing that they do not say. Put the
number of the passage behind each statement, as in [2]."""


def add_thinkers(app: App) -> None:
    """Declare `planner` and `editor` if a model is configured."""
    model = os.environ.get(MODEL)
    if model:
        app.add_agent("planner", LLMAgent(model, instructions=PLANNER, output=Plan, stream=False))
        app.add_agent("editor", LLMAgent(model, instructions=EDITOR))
