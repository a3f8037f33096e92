"""A driver process: `python -m runtime_core.clusters.driver <engine> <socket> <lifeline>`, started by `process.py`."""

from __future__ import annotations

import sys

from runtime_core.clusters.driver.host import main

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
