"""Statistics of many tasks with Spark: `report.py` is the job, `app.py` the agent that runs it."""
