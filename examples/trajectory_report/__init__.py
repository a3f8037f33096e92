"""What many tasks did, counted by Spark: `report.py` is the job, `app.py` the agent that asks for it."""
