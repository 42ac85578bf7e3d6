"""`python -m jpaged.entrypoints.openai.api_server --model M`: `jpaged serve` under vLLM's name."""

import sys

from jpaged.cli import console

if __name__ == "__main__":
    sys.argv[1:1] = ["serve"]
    console()
