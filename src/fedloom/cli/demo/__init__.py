"""The `fedloom demo` command: five papers, each with a scene that puts its claim to the test."""
