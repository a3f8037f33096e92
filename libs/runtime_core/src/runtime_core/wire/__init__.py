"""The protocol with clients: envelopes, their commands, and the events that Weft sends back."""
