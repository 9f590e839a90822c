"""Campaigns of faults: mutated inputs, kills, damaged files; each by hand or, in part, as tests."""
