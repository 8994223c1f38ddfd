"""The site's side of a Flower run."""
