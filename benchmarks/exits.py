"""Scripts that end without closing their engine: do they end with their own status?

    python benchmarks/exits.py [--rounds 10] [--python PYTHON] [--only WORDS ...]

Each round runs every script of SCRIPTS once. Even rounds have programs in the cache, odd rounds an empty cache. Scripts
that end while an engine starts or works do so at another moment each round. A script is wrong if its status differs, or
if Python printed a traceback that the script did not raise. Status 134 and 139 are aborts. Prints each wrong script
with its last lines, and exits with 1 if there is one.
"""

import argparse
import collections
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from tqdm import tqdm

LONGEST = 120.0  # seconds until a script counts as hung
HEAD = """
import os, sys, threading, time
from jpaged import AsyncLLM, LLM, SamplingParams
FOUR = SamplingParams(max_tokens=4, temperature=0)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
PAUSE = float(os.environ["PAUSE"])
def make(kind=LLM): return kind("demo", compilation_cache_dir=os.environ["PROGRAMS"])
def use(llm, prompts="def f(", params=FOUR): llm.generate(prompts, params, use_tqdm=False)
def in_thread(work): threading.Thread(target=work, daemon=True).start(); time.sleep(PAUSE)
"""
# Name of a script: its code, and the status that it should end with.
SCRIPTS = {
    "inline": ("use(make())", 0),
    "global": ("llm = make(); use(llm)", 0),
    "unused": ("make()", 0),
    "local": ("def main():\n    llm = make(); use(llm)\nmain()", 0),
    "deleted": (
        "llm = make(); use(llm); del llm\n"
        "assert not [t for t in threading.enumerate() if t.name.startswith('jpaged')], threading.enumerate()", 0,
    ),
    "in a cycle": ("llm = make(); use(llm); cycle = [llm]; cycle.append(cycle); del llm, cycle", 0),
    "collected": (
        "import gc\nllm = make(); use(llm); cycle = [llm]; cycle.append(cycle); del llm, cycle; gc.collect()", 0,
    ),
    "exception": ("def main():\n    llm = make(); use(llm); raise ValueError('on purpose')\nmain()", 1),
    "sys.exit(3)": ("def main():\n    llm = make(); use(llm); sys.exit(3)\nmain()", 3),
    "Ctrl-C": (
        "def main():\n    llm = make(); use(llm); os.kill(os.getpid(), 2); time.sleep(9)\nmain()", -signal.SIGINT,
    ),
    "two engines": ("def main():\n    a, b = make(), make(); use(a); use(b)\nmain()", 0),
    "made again": ("llm = make(); use(llm)\nllm = make(); use(llm)", 0),
    "asyncio": (
        "import asyncio\n"
        "async def main():\n    async for _ in make(AsyncLLM).generate('def f(', FOUR): pass\n"
        "asyncio.run(main())", 0,
    ),
    "asyncio, stream left": (
        "import asyncio\n"
        "async def main():\n    async for _ in make(AsyncLLM).generate('def f(', ENDLESS): return\n"
        "asyncio.run(main())", 0,
    ),
    "asyncio, timeout": (
        "import asyncio\nllm = make(AsyncLLM)\n"
        "async def main():\n    async for _ in llm.generate('def f(' * 3000, FOUR): return\n"
        "asyncio.run(asyncio.wait_for(main(), 0.05))", 1,
    ),
    "daemon thread generates": ("in_thread(lambda: use(make(), ['x'] * 50, ENDLESS))", 0),
    "daemon thread starts": ("in_thread(lambda: use(make()))", 0),
    "spawn": (
        "import multiprocessing\n"
        "def child(): use(make())\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start(); process.join(); sys.exit(process.exitcode)", 0,
    ),
    "fork is refused": (
        "import multiprocessing\nllm = make(); use(llm)\n"
        "def child():\n    try: use(llm)\n    except Exception as error: sys.exit(5 if 'spawn' in str(error) else 6)\n"
        "process = multiprocessing.get_context('fork').Process(target=child); process.start(); process.join()\n"
        "assert process.exitcode == 5\nuse(llm)", 0,
    ),
    "forked child ends": (
        "llm = make(); use(llm)\npid = os.fork()\nif not pid: os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\nuse(llm)", 0,
    ),
}  # fmt: skip


def pause(name: str, round: int) -> float:
    """Seconds until the main thread ends while a daemon thread is at work."""
    return 3 + round % 7 * 0.4 if name == "daemon thread generates" else 0.2 + round % 12 * 0.45


def run(python: str, file: pathlib.Path, programs: str, pause: float) -> tuple[int | str, str]:
    """Run a script. Returns its status, or "hung", and its output."""
    try:
        done = subprocess.run(
            [python, file], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LONGEST,
            env=os.environ | {"PROGRAMS": programs, "PAUSE": str(pause)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "hung", ""
    return done.returncode, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help=f"each has {len(SCRIPTS)} runs")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to try, with jpaged installed")
    parser.add_argument("--only", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS), metavar="NAME")
    arguments = parser.parse_args()
    wrong: collections.Counter[str] = collections.Counter()
    runs = [(round, name) for round in range(arguments.rounds) for name in arguments.only]
    with tempfile.TemporaryDirectory() as folder:
        warm, file = f"{folder}/warm", pathlib.Path(folder, "script.py")
        ready = "llm = make(); llm.wait_until_ready(); llm.close(); print(sys.modules['jpaged'].__file__)"
        file.write_text(HEAD + ready)
        status, printed = run(arguments.python, file, warm, 0)
        print(printed, flush=True)  # which jpaged it is
        if status:
            return 1
        for round, name in tqdm(runs, unit="run", disable=None):
            code, expected = SCRIPTS[name]
            file.write_text(HEAD + code + "\n")
            programs = f"{folder}/{round}-{name}" if round % 2 else warm
            status, printed = run(arguments.python, file, programs, pause(name, round))
            noise = "Exception ignored" in printed or "Fatal Python error" in printed
            if status != expected or noise or (expected == 0 and "Traceback" in printed):
                wrong[name] += 1
                print(f"{name}, round {round}: status {status}, expected {expected}\n{printed[-1500:]}", flush=True)
    version = subprocess.run([arguments.python, "-V"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"{version}: {len(runs)} scripts ended, {wrong.total()} wrong", dict(wrong) or "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
