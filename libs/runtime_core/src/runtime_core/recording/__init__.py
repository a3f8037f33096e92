"""Copies the record stream into the trajectory store: `entries` (what an entry says), `recorder` (the role that
copies), `local` (the same inside the process of a LocalApp)."""
