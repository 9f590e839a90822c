"""Text encoders: packed tokens to one vector a text."""
