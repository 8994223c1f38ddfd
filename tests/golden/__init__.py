"""Golden runs: compare small runs of an old commit and of the working tree."""
