"""The work of the state-manager: admits commands, starts tasks, sends answers, frees memory, finds what is stuck."""
