"""Replays recorded tasks: their code or their messages, on the recorded results."""
