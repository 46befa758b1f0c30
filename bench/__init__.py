"""Benchmarks of mha_fast beside NumPy, its reference and other libraries; not part of the installed package."""
