"""Code that several commands use: results and their files, pictures of the block pool, built-in prompts.

It holds no command and no flag: those are in `jpaged.cli` and `jpaged.cli.flags`.
"""
