"""``python -m headtrace``: the command line, where the script is not on the path."""

from headtrace.cli import main

if __name__ == "__main__":
    main()
