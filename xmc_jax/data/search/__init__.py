"""Nearest labels: exact search, indexes, clusters."""
