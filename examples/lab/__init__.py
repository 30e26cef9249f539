"""Real Kubernetes clusters as plain processes on this machine."""
