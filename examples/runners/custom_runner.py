"""A custom runner: your own logic between setup and cleanup."""

import asyncio
import logging

from weft import Context, TaskResponse
from weft.aworld import Runners, Task, TaskRunner

logger = logging.getLogger(__name__)


class MyCustomRunner(TaskRunner):
    """Custom Runner"""

    def __init__(self, task: Task, *args, **kwargs):
        super().__init__(task, *args, **kwargs)
        # add custom init
        self.custom_state = {}

    async def pre_run(self):
        """prepare"""
        await super().pre_run()
        # custom logic
        logger.info("Custom runner preparing...")

    async def do_run(self, context: Context = None) -> TaskResponse:
        """Custom response，return TaskResponse."""
        observation = self.observation

        try:
            # 1. execution core logic
            result = await self._execute_custom_logic(observation)

            # 2. gen response
            response = TaskResponse(task_id=self.task.id, content=result, status="success")

            return response

        except Exception as e:
            logger.error(f"Execution failed: {e}")
            return TaskResponse(task_id=self.task.id, content=str(e), status="failed")

    async def _execute_custom_logic(self, observation):
        """Custom logic"""
        pass

    async def post_run(self):
        """clean"""
        await super().post_run()
        # custom logic
        logger.info("Custom runner cleaning up...")


class Greeter(MyCustomRunner):
    """The same with real logic: it calls no agent, and rejects an empty name."""

    async def _execute_custom_logic(self, observation):
        if not observation.content:
            raise ValueError("whom shall I greet?")
        return f"Hello, {observation.content}"


async def main() -> None:
    tasks = [
        Task(id="empty", runner_cls=MyCustomRunner),
        Task(id="greets", input="world", runner_cls=Greeter),
        Task(id="refuses", runner_cls="examples.runners.custom_runner.Greeter"),
    ]
    for name, response in (await Runners.run_task(tasks)).items():
        print(name, response.status, response.content or response.msg)


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    asyncio.run(main())
