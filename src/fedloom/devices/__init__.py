"""Where and how precisely tensors are computed."""
