"""Examples that run: a federation on a laptop, and slices of real traces."""
