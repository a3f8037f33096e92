"""An event-driven runner: it sends its own first message, and handlers do the rest."""

import asyncio

from weft import AgentContext
from weft.aworld import AgentMessage, Message, Runners, Task, TaskRunner

msg = AgentMessage(receiver="loud", payload="a stream", sender="user")


class EventDrivenRunner(TaskRunner):
    """Sends `msg` first, and extends the agent's input."""

    async def pre_run(self):
        await super().pre_run()
        await self.event_mng.register("agent", "loud", self.exclaim, transformer=True)

    def exclaim(self, message: Message) -> Message:
        return message.replace(payload=f"{message.payload}!")

    async def do_run(self):
        # send init msg
        await self.event_mng.emit_message(msg)
        # core process
        await self._do_run()
        # gen trajectory
        await self._save_trajectories()
        # build response
        resp = self._response()


async def loud(ctx: AgentContext, text: str) -> str:
    """Return the text in capitals."""
    return text.upper()


async def main() -> None:
    task = Task(agent=loud, runner_cls=EventDrivenRunner)
    response = (await Runners.run_task(task))[task.id]
    print(response.status, response.content)


if __name__ == "__main__":
    asyncio.run(main())
