"""Entry point of the `fedloom` command.

It imports nothing heavy, so that Ctrl-C works while PyTorch loads.
"""

import sys


def main() -> None:
    """Import the command line and run it."""
    try:
        from fedloom.cli.main import main as command
    except KeyboardInterrupt:
        print("fedloom: interrupted", file=sys.stderr)
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
