"""A runner that searches a tree: an agent proposes actions, a tool executes them, the best state wins."""

import asyncio

from weft import AgentContext, Context, TaskResponse
from weft.aworld import Observation, Runner, Runners, Swarm, Task


class TreeSearchRunner(Runner):
    """Customization based on tree search runner."""

    def __init__(self, task: Task, *args, **kwargs):
        super().__init__(task, *args, **kwargs)
        self.max_depth = self.conf.get("max_depth", 3)
        self.max_breadth = self.conf.get("max_breadth", 3)
        self.search_tree = {}

    async def do_run(self, context: Context = None) -> TaskResponse:
        """Perform tree search."""
        observation = self.observation

        # depth search first
        best_result = await self._dfs(observation, depth=0)

        return TaskResponse(task_id=self.task.id, content=best_result, status="success")

    async def _dfs(self, state, depth):
        """depth search first"""
        if depth >= self.max_depth:
            return state

        agent = self.swarm.ordered_agents[0]
        # get action
        actions = await self._get_possible_actions(agent, state)

        # Exploring the max-breadth actions before exploration
        best_result = state
        best_score = self._evaluate(state)

        for action in actions[: self.max_breadth]:
            # execute action
            next_state = await self._execute_action(action, state)

            # Recursively searching
            result = await self._dfs(next_state, depth + 1)

            # Evaluate result
            score = self._evaluate(result)
            if score > best_score:
                best_score = score
                best_result = result

        return best_result

    async def _get_possible_actions(self, agent, state):
        """Obtain possible actions."""
        obs = Observation(content=str(state))
        output = await agent.run(obs)
        return output.get("actions", [])

    async def _execute_action(self, action, state):
        """Execute action."""
        tool = self.tools.get(action["tool"])
        result = await tool.step(action["args"])
        return result.get("next_state", state)

    def _evaluate(self, state):
        """Evaluate the status."""
        # custom evaluate process
        return len(str(state))


async def proposer(ctx: AgentContext, state: str) -> dict[str, object]:
    """Propose to append each of three words to the state."""
    words = ("a", "bee", "see")
    return {"actions": [{"tool": "append", "args": {"state": state, "word": word}} for word in words]}


async def append(state: str, word: str) -> dict[str, str]:
    """Append a word, unless it is the last one already."""
    return {"next_state": state if state.endswith(word) else f"{state} {word}"}


async def main() -> None:
    task = Task(
        input="find:",
        swarm=Swarm(proposer),
        tools=[append],
        conf={"max_depth": 3, "max_breadth": 2},
        runner_cls=TreeSearchRunner,
    )
    response = (await Runners.run_task(task))[task.id]
    print(response.status, response.content)


if __name__ == "__main__":
    asyncio.run(main())
