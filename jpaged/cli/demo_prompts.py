"""The default prompts of `jpaged generate`: twenty beginnings of Python code for the demo model."""

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
"""Short on purpose: the output then shows the model, not the prompt."""
