"""A service under cProfile: `python -m benchmarks.profiled_service agent_handler <file>`.

The file is written when the service ends.
"""

from __future__ import annotations

import cProfile
import sys

from runtime_core.host.service import build_of, run_service

if __name__ == "__main__":
    service, path = sys.argv[1:]
    build = build_of(service)
    profile = cProfile.Profile()
    status = profile.runcall(run_service, service.replace("_", "-"), build)
    profile.dump_stats(path)
    sys.exit(status)
