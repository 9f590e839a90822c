"""Tables of label vectors: rows by id, and their optimiser."""
