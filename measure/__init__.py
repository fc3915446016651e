"""What programs share that measure: clocks, the machine, kinds of GPU work, statistics, tables, pictures, files, and the store
of a measurement that resumes. It imports none of them."""
