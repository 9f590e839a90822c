"""UniDEC and DePSL: dual encoder and classifier."""
