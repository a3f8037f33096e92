"""Any service of an image, chosen at the start: `SERVICE=agent-handler python -m services`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def services() -> list[str]:
    """The names of all services, as they are written with hyphens."""
    here = Path(__file__).parent
    return sorted(path.parent.name.replace("_", "-") for path in here.glob("*/__main__.py"))


def main() -> int:
    """Runs the service in this process. 2: `SERVICE` names none, which is told in one line."""
    name = os.environ.get("SERVICE", "").strip().replace("_", "-")
    if name not in services():
        told = f"SERVICE={name!r}: there is no such service" if name else "SERVICE is not set"
        print(f"weft: {told}; choose one of {', '.join(services())}", file=sys.stderr)
        return 2
    runpy.run_module(f"services.{name.replace('-', '_')}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
