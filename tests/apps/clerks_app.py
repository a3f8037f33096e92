"""Agents that a model drives, for tests on the services: as first deployed, and as deployed later."""

from __future__ import annotations

from weft import App, Approve, LLMAgent

app = App("llm")
"""As it is deployed first."""
later = App("llm")
"""As it is deployed while conversations wait: with other instructions, more tools, other rules and arguments."""
archive = App("archive")
"""Another app, whose tools run in a separate pool."""
APPROVED = ("pay", "search")


@app.tool
def pay(amount: int) -> str:
    return f"paid {amount}"


@app.tool
def search(query: str) -> str:
    """Search."""
    return f"{query} is fine"


@later.tool(name="pay")
def pay_later(amount: int, currency: str = "CHF") -> str:
    return f"paid {amount} {currency}"


@later.tool(name="search")
def search_exactly(exact_query: str) -> str:
    """Search exactly."""
    return f"exactly {exact_query}"


@later.tool
def audit(year: int) -> str:
    return f"{year} is audited"


@archive.tool(name="files.read", pool="far")
def read(path: str) -> str:
    """Read a file."""
    return f"the text of {path}"


@archive.tool(name="files.list", pool="far")
def every() -> list[str]:
    return ["a.txt"]


app.add_agent(
    "clerk",
    LLMAgent(
        "openai-chat:gpt-test", instructions="You are a clerk.", tools=["pay", "search"], approval=[Approve("pay")]
    ),
)
app.add_agent("patient", LLMAgent("openai-chat:gpt-test", tools=["search"], max_turns=2))
app.add_agent("reader", LLMAgent("openai-chat:gpt-test", tools=["files.*"]))
app.add_agent("chatty", LLMAgent("openai-chat:gpt-test", instructions="You remember."))
later.add_agent(
    "clerk",
    LLMAgent(
        "openai-chat:gpt-test",
        instructions="You are another clerk.",
        tools=["audit", "search", "pay"],
        approval=[Approve("search"), Approve("audit")],
        output=list[str],
    ),
)
later.add_agent("patient", LLMAgent("openai-chat:gpt-test", tools=["search"], max_turns=20))
