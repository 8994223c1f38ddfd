"""Many clients at once on one or several GPUs."""
