"""Starts the server: `python serving/app.py MODEL [FLAGS]` does the same as `jpaged serve MODEL [FLAGS]`."""

import sys

from jpaged.cli import console

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    console()
