"""Flax models behind init/apply; imports layer 1 only."""
