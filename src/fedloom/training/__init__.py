"""Local training of one client: trainer, batches, optimizers, buffers."""
