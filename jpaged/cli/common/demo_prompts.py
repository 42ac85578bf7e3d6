"""Prompts of Python code for the demo model, and the defaults of `jpaged generate` for it."""

BUILT_IN_PROMPTS: tuple[str, ...] = (
    "def read_json(path):",
    "def write_lines(path, lines):",
    "def is_prime(n):",
    "def parse_args(argv):",
    "def split_words(text):",
    "def copy_file(source, target):",
    "def get_option(self, name, default=None):",
    "def find_files(directory, pattern):",
    "def _check_type(value, expected):",
    "def format_time(seconds):",
    "def main():\n    parser = argparse.ArgumentParser()",
    "def close(self):\n    if self._file is not None:",
    "def __repr__(self):",
    "class Stack:\n    def __init__(self):",
    "class ParseError(Exception):",
    "class Queue:\n    def __init__(self, maxsize=0):",
    "class Node:\n    def __init__(self, name, children):",
    "import os\nimport sys\n",
    "try:\n    import ssl\nexcept ImportError:",
    "for name in os.listdir(path):",
)
"""For tools and tests. They are short, so that the output shows the model, not the prompt."""

FIRST_PROMPTS: tuple[str, ...] = (
    "def split_path(path):",
    "def read_lines(path):\n    with open(path) as f:",
    "def to_int(text):\n    try:",
    "def get(self, key, default=None):\n    try:",
    "class Lock:\n    def __enter__(self):",
    "class Stack:\n    def __init__(self):\n        self.items = []",
)
"""The default prompts of `jpaged generate`."""

FIRST_STOP = ("\n\n\n", "\ndef ", "\nclass ", "\n#")
"""Stop strings for FIRST_PROMPTS: an answer ends after its function or class."""

DEMO_REPETITION_PENALTY = 1.15
"""With it, 5 of 20 greedy answers of 64 tokens repeat a line. With a penalty of 1, 15 of 20 do."""
