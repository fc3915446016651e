"""Benchmarks of kernels and of a training step, and their recorded results.

python -m benchmarks.norms           every norm case, width and library: share of the card's copy bandwidth
python -m benchmarks.published       comparisons that others have published, repeated with ours added
python -m benchmarks.host            what one call costs the CPU, eager and compiled
python -m benchmarks.memory          what a chain of fused blocks holds, against PyTorch's
python -m benchmarks.train_step      a whole training step beside nanoGPT's, with the breakdown of each
python -m benchmarks.scaling         weak scaling of a training step over the GPUs of a machine

python -m benchmarks.readme          writes the tables of README.md and docs/ from benchmarks/results/
"""
