"""What programs share that measure: clocks, kinds of GPU work, statistics, order of blocks, tables. It imports none of them."""
