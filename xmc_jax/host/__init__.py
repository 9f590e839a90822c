"""The process and its machine: memory allocator, XLA options, signals, console."""
