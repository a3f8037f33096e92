"""What deploy/ holds: it builds, Kubernetes would take it, and it keeps the rules that it states."""
