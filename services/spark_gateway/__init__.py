"""Runs engine steps on Spark. Reads `spark` (group `spark-gateway`); emits results and records by its commits."""
