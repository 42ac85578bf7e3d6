"""`python -m jpaged`: the same program as `jpaged`."""

from jpaged.cli import console

if __name__ == "__main__":
    console()
