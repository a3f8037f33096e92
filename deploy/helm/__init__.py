"""The Helm chart, and the program that writes it."""
