"""The client: submits tasks, waits for their ends, reads their streams, forks and schedules them."""
