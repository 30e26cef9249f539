"""A federation on one machine: a hub and three unlike simulated clusters with their agents."""
