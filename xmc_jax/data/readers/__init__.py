"""Readers: from people's files to a data set."""
