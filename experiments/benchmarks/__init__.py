"""Benchmarks: ``python -m experiments.benchmarks --help`` lists the cases."""
