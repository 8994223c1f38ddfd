"""The `fedloom demo` command puts the claims of five papers to the test."""
