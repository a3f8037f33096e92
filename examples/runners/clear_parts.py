"""A runner in separate parts: the main method reads as a list, and each part can be tested alone."""

import asyncio

from weft import AgentContext, TaskResponse
from weft.aworld import Runners, Task, TaskRunner


class WellDesignedRunner(TaskRunner):
    """Clear processes and modules"""

    async def do_run(self, context):
        # the main process only
        return await self._main_execution(context)

    async def _main_execution(self, context):
        """main logic"""
        observation = self.observation
        results = []

        # 1. pre process
        processed_obs = await self._preprocess(observation)

        # 2. execute main logic
        for step in range(self.max_steps):
            output = await self._execute_step(processed_obs, step)
            results.append(output)

            if self._should_stop(output):
                break

            # 3. update observation
            processed_obs = self._update_observation(processed_obs, output)

        # 4. post process
        final_result = await self._postprocess(results)
        return TaskResponse(task_id=self.task.id, content=final_result, status="success")

    async def _execute_step(self, obs, step):
        return await self.swarm.ordered_agents[0].run(obs)

    def _should_stop(self, output):
        return output == 1

    def _update_observation(self, ob, output):
        return output

    async def _preprocess(self, observation):
        return int(observation.content)

    async def _postprocess(self, results):
        return results


async def collatz(ctx: AgentContext, number: int) -> int:
    """Return the next Collatz number: n/2 if n is even, else 3n+1."""
    return number // 2 if number % 2 == 0 else 3 * number + 1


async def main() -> None:
    task = Task(input="6", agent=collatz, runner_cls=WellDesignedRunner, conf={"max_steps": 20})
    response = (await Runners.run_task(task))[task.id]
    print(response.status, response.content)


if __name__ == "__main__":
    asyncio.run(main())
