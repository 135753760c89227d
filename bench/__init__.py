"""Benchmarks. Run them from the repository root, such as ``python -m bench.throughput --tiny``."""
