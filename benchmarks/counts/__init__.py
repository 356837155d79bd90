"""What is counted instead of timed: instructions of kernels, bytes of messages and records. None of it needs a GPU."""
