"""What crosses the edges: envelopes, commands and events of clients, and the steps on the record stream."""
