"""What crosses the edges: envelopes, commands, events, and what a client is told of a task."""
