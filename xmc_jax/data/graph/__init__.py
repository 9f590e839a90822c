"""The label graph, Gandalf's targets, and features of labels."""
