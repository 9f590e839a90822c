"""Families of systems; a new one is a folder here and a line in the dict."""
