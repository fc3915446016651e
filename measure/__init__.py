"""What ablation and benchmarks share: statistics, timing, the order of blocks, tables. It imports none of them."""
