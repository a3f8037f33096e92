"""The process that Spark's Python workers are forked from, in the local server.

It imports what every worker imports, once: two seconds of a processor, which each new worker would pay for.
"""

from __future__ import annotations

if __name__ == "__main__":
    # A worker imports all of these when it reads its first call.
    import pandas  # noqa: F401  # for the workers, like the others
    import pyarrow  # noqa: F401
    import pyspark.cloudpickle
    import pyspark.sql.pandas.serializers
    import pyspark.worker  # noqa: F401
    from pyspark import daemon

    import runtime_core.app.loading  # noqa: F401

    daemon.manager()
