"""How one client trains: batches, optimizers, the trainer."""
