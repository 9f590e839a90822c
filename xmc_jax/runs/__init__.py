"""Runs: from a configuration to objects, to files."""
