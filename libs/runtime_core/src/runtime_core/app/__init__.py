"""What a program declares: the `App`, its registry, and how a service finds it."""
