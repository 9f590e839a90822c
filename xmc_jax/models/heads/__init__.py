"""Heads: from a text's vector to the embeddings of a system."""
