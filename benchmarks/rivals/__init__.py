"""Programs that train without the server, for `benchmarks.train_throughput` to run beside it."""
