"""Benchmarks of kernels and of weak scaling, and their recorded results. ablate.py measures a training step.

python -m benchmarks.norms           every norm case, width and library: % of the card's copy bandwidth
python -m benchmarks.sites           sites with a norm of the branch, and pointwise norms
python -m benchmarks.rotary          norm and rotary positions of queries and keys
python -m benchmarks.losses          softmax and cross-entropy
python -m benchmarks.activation      activations of gated MLPs
python -m benchmarks.gated           RMSNorm beside a gate
python -m benchmarks.modulated       norms that are modulated per sample
python -m benchmarks.host            what one call costs the CPU, eager and compiled
python -m benchmarks.memory          what a chain of fused blocks holds, against PyTorch's
python -m benchmarks.scaling         weak scaling of a training step over the GPUs of a machine
python -m benchmarks.study_errors    how often compare.py errs, on drawn studies; needs no GPU
python -m benchmarks.parity_errors   how often the parity test of ablate.py fails for correct arms; needs no GPU

python -m benchmarks.records         records all that README and docs show, on the GPU that is here
python -m benchmarks.readme          writes their tables and pictures from benchmarks/results/
"""
