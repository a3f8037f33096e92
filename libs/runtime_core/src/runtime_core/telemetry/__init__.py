"""What a process says of itself: `names` and `metrics`, `logs`, and the `endpoint` that serves them."""
