"""A task with a swarm, a config, hooks and a stream of its steps."""

import asyncio

from weft import AgentContext, App, StreamingMode
from weft.aworld import Runners, Swarm, Task
from weft.hooks import HookEvent

app = App("hooks")


async def outline(ctx: AgentContext, topic: str) -> list[str]:
    """Return the headings of a text about the topic."""
    return [f"What is {topic}?", f"Who needs {topic}?"]


async def write(ctx: AgentContext, headings: list[str]) -> str:
    """Write the text, and stream each section when it is complete."""
    for heading in headings:
        await ctx.emit(heading)
    return " ".join(headings)


@app.hook("task_created")
def init_logging(event: HookEvent) -> None:
    print("init_logging", event.point)


@app.hook("task_created")
def init_context(event: HookEvent) -> None:
    print("init_context", event.point)


@app.hook("task_failed")
def handle_error(event: HookEvent) -> None:
    print("handle_error", event.error)


@app.hook("task_failed")
def send_alert(event: HookEvent) -> None:
    print("send_alert", event.error)


user_input = "a stream"
multi_agent = Swarm(outline, write)

# example of task
task = Task(
    name="complex_task",
    input=user_input,
    swarm=multi_agent,
    conf={"max_steps": 20, "run_mode": "interactive", "check_input": True},
    hooks={"task_created": ["init_logging", "init_context"], "task_failed": ["handle_error", "send_alert"]},
    streaming_mode=StreamingMode.CORE,
)


async def main() -> None:
    async for event in Runners.streaming_run_task(task, app=app):
        if event.response is not None:
            print(event.type, event.response.answer)
        for row in event.data.get("steps", ()) if event.response is None else ():
            if row["kind"] == "agent":
                print(event.type, row["name"], row["status"])


if __name__ == "__main__":
    asyncio.run(main())
