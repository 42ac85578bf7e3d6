"""Starts the server: `python serving/app.py MODEL [FLAGS]` does the same as `jpaged serve MODEL [FLAGS]`."""

import sys

from jpaged.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
