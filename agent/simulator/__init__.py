"""The embedded cluster: traces, hardware, workloads and the event engine that runs them."""
