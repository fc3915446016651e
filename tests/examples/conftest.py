from tests.benchmarks.conftest import imported_is_no_garbage  # noqa: F401  examples time themselves
