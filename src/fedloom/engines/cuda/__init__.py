"""Train many clients at once on one or several GPUs."""
