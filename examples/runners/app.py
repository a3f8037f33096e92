"""The app of these examples for services: `WEFT_APP=examples.runners.app:app`."""

from examples.runners.clear_parts import WellDesignedRunner, collatz
from examples.runners.custom_runner import Greeter, MyCustomRunner
from examples.runners.event_driven import EventDrivenRunner, loud
from examples.runners.task_with_hooks import app as hooks
from examples.runners.task_with_hooks import outline, write
from examples.runners.tree_search import TreeSearchRunner, append, proposer
from weft import App

app = App("runner-examples")
app.include(hooks)
for runner in (MyCustomRunner, Greeter, TreeSearchRunner, WellDesignedRunner, EventDrivenRunner):
    app.add_runner(runner)
app.agent("collatz")(collatz)
app.agent("loud")(loud)
app.agent("outline")(outline)
app.agent("write")(write)
app.agent("proposer")(proposer)
app.tool(append)
