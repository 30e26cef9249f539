"""What both sides of the federation must agree on; imports neither side."""
