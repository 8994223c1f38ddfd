"""The command line: parses commands, prints results, shows progress."""
