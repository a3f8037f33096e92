"""Checks of deploy/: it builds, Kubernetes accepts it, and it follows the rules that it documents."""
