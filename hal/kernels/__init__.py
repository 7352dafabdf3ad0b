"""Triton kernels, written once for every backend whose compiler takes Triton.

Nothing here chooses grids, tiles or devices: backends launch the kernels (`hal.backends.*.triton`) and say what they
accept. The modules import triton, so only a backend that found it may import them.
"""
