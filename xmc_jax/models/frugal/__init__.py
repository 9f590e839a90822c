"""The frugal classifiers: query encoders, parts of label vectors, clusters."""
