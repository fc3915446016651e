"""What ablation, benchmarks and training share: statistics, timing, the order of blocks, tables. It imports none of them."""
