"""Benchmarks: policies against policies on simulated clusters, and what decisions cost."""
