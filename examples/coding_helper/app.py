"""The app: an agent that a model drives, with the tools of an MCP server. A human approves each write.

On services: WEFT_APP=examples.coding_helper.app:app, with CODING_HELPER_FOLDER and what the model needs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from weft import App, Approve, LLMAgent

INSTRUCTIONS = """You help with the code in one folder. Look before you change: list, search and read files first.
Keep changes small, write whole files, and say at the end what you have changed and why."""


def app_for(folder: str, model: str) -> App:
    """Return the helper for one folder. `model` is a pydantic-ai name, such as `openai-chat:gpt-5.2`."""
    app = App("coding-helper")
    app.add_mcp(
        "files",
        command=[sys.executable, str(Path(__file__).with_name("files_server.py")), folder],
        timeout_seconds=30,
    )
    app.add_agent(
        "helper",
        LLMAgent(model, instructions=INSTRUCTIONS, tools=["files.*"], approval=[Approve("files.write_file")]),
    )
    return app


app = app_for(os.environ.get("CODING_HELPER_FOLDER", "."), os.environ.get("CODING_HELPER_MODEL", "openai-chat:gpt-5.2"))
