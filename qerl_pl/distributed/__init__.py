"""Several processes: communication, the Lightning strategy and the failure detector."""
