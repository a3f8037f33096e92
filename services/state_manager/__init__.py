"""Admits tasks in order, relays answers, trims and sweeps. One replica leads at a time; the others stand by."""
