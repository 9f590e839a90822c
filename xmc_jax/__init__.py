"""Extreme multi-label classification with label text, in JAX: UniDEC, DePSL and Gandalf."""

__version__ = "0.1.0"
