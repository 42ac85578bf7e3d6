"""Text to train tokenizers on: several scripts, code, and punctuation."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEMO = ROOT / "jpaged" / "demo_model"
CORPUS = [
    *(ROOT / "docs" / "glossary.md").read_text().splitlines(keepends=True),
    *(ROOT / "jpaged" / "errors.py").read_text().splitlines(keepends=True),
    *["中文字符，你好。 多么美好的一天、\n", "これはペンです。カタカナ\n"] * 20,
    *["한국어 문장입니다.\n", "Привет, мир!\n"] * 20,
    *["don't we'll I'm it's 3.14 and 1,000,000, the end.\n\n", "  two  blanks\tand tabs \r\n"] * 20,
]
