"""Tokenizers, token stores and word vectors."""
