"""The multiprocess engine: worker processes that share memory."""
