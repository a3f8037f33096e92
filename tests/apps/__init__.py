"""Apps that tests give to separate processes, by name: `tests.apps.fleet_app:app`."""
