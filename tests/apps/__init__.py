"""Apps that tests give to processes of their own, by name: `tests.apps.fleet_app:app`."""
