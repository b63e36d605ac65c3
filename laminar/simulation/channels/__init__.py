"""The controller's and the workers' channels in memory, with latency and faults."""
