"""From a command to a started task: admission, publishers, tenants and schedules."""
