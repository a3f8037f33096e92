"""Admits commands and starts tasks: admission, publishers, tenants, schedules, and the relay of answers."""
