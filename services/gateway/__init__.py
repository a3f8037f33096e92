"""Offers tasks over HTTP: submit, list, follow, answer, cancel. Stateless; every replica answers every request."""
