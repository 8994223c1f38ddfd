"""The server side of a Flower run."""
