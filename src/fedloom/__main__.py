"""The door of the command: it is light, so that Ctrl-C while PyTorch is being loaded ends in a sentence too."""

import sys


def main() -> None:
    """Load the command and run it."""
    try:
        from fedloom.cli.main import main as command
    except KeyboardInterrupt:
        print("fedloom: interrupted", file=sys.stderr)
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
