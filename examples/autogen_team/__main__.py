"""`python -m examples.autogen_team`: both programs, one after the other."""

from __future__ import annotations

import asyncio
import runpy

from examples.autogen_team import team

if __name__ == "__main__":
    # A script as it was printed: it runs when it is loaded.
    runpy.run_module("examples.autogen_team.researcher_writer", run_name="__main__")
    print()
    asyncio.run(team.main())
