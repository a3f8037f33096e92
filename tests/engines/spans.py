"""The spans of a step on a cluster: those of the gateway, and of code in the cluster's own processes."""

from __future__ import annotations

from tests.engine_backends.world import World
from tests.servers.otlp_receiver import OtlpReceiver


async def are_one_tree(here: World, receiver: OtlpReceiver, engine: str) -> None:
    """Check that a step's own span has its gateway's as parent, and that one its agent's."""
    task = await here.step("traced", engine)
    trace, parent, said = (await here.result(task)).value()
    assert said == f"00-{trace}-{parent}-01"
    lines: list[list[str]] = []

    def sent() -> bool:
        """Whether the spans from the worker's parent up to the agent's turn have arrived."""
        spans = {span.id: span for span in receiver.spans(trace)}
        line, at = [], parent
        while at in spans:
            line.append(spans[at].name)
            at = spans[at].parent
        lines.append(line)
        return line[:4] == [f"engine {engine} traced", f"process {engine}", "invoke_agent step", "process agent"]

    await here.until(sent, f"the spans of the step have come; {lines[-1:]}")
