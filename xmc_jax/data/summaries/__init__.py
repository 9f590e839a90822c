"""What a data set is made of, and numbers to beat."""
