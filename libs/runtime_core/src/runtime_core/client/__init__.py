"""The client: submits tasks, waits for their answers, reads their streams, forks and schedules them, finds problems."""
