"""Scripts that make the tables of README.md; run them from the repository's root."""
