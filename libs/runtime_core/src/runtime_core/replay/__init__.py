"""Replays recorded tasks: their code with the recorded results, or their messages."""
