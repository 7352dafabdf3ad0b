"""Benchmarks. Each is a module: `python -m hal.bench.NAME`."""
