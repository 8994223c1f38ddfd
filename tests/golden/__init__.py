"""Golden runs: an old commit and the working tree play the same small runs, and must agree in all that they write."""
