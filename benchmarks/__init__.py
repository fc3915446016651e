"""Benchmarks of kernels and of weak scaling, and their recorded results. docs/benchmarks.md lists the programs."""
