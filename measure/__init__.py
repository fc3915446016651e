"""What programs share that measure: clocks, the machine, kinds of GPU work, statistics, tables. It imports none of them."""
