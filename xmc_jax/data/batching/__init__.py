"""Batches on the host: epochs, packed rows, label pools."""
