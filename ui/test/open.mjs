// Opens the page in Chromium and watches it: every error, policy violation and request to another host is recorded.

import { chromium } from "playwright-core";

export const API_KEY = "talk";
export const ADMIN_KEY = "look";

/** Start the system's Chromium. */
export const launch = () => chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--disable-gpu"] });

/** Open the page at `base`/ui and return it with the list of its problems. */
export async function open(browser, base, { width = 1280, height = 800, dark = false, scale = 1, hash = "" } = {}) {
  const colorScheme = dark ? "dark" : "light";
  const context = await browser.newContext({ viewport: { width, height }, colorScheme, deviceScaleFactor: scale });
  const page = await context.newPage();
  const problems = [];
  page.on("pageerror", (error) => problems.push(`error: ${error.message}`));
  page.on("dialog", (dialog) => {
    problems.push(`dialog: ${dialog.message()}`);
    void dialog.dismiss();
  });
  page.on("console", (message) => {
    const refused = /status of 4\d\d/.test(message.text()); // the tests ask for those
    if (["error", "warning"].includes(message.type()) && !refused) problems.push(`console: ${message.text()}`);
  });
  page.on("request", (request) => {
    if (new URL(request.url()).origin !== new URL(base).origin) problems.push(`request: ${request.url()}`);
  });
  await page.addInitScript(() => {
    window.violations = [];
    document.addEventListener("securitypolicyviolation", (event) => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
  });
  await page.goto(`${base}/ui${hash}`);
  await page.locator("h1").waitFor();
  return { page, problems, close: () => context.close() };
}

/** Enter the keys as a reader does. */
export async function enterKeys(page) {
  await page.locator(".dot.good, .dot.bad").waitFor(); // the server's first answer opens the form
  if (!(await page.locator("#api-key").isVisible())) await page.getByRole("button", { name: "Keys" }).click();
  await page.locator("#api-key").fill(API_KEY);
  await page.locator("#admin-key").fill(ADMIN_KEY);
  await page.getByRole("button", { name: "Done" }).click();
}

/** Run `count` completions with common beginnings, until `signal` aborts. */
export function load(base, count, signal) {
  const shared = [
    "import json\nimport pathlib\nimport collections\n\n\ndef read_records(path: pathlib.Path) -> list[dict]:\n    \"\"\"Read one JSON object per line.\"\"\"\n    with path.open() as file:\n        return [json.loads(line) for line in file]\n\n\n",
    "class Queue:\n    \"\"\"A queue with a limit.\"\"\"\n\n    def __init__(self, limit: int):\n        self.items = []\n        self.limit = limit\n\n    def put(self, item) -> None:\n",
  ];
  const ends = ["def group_by(records, key):\n", "def write_records(path, records):\n", "def count_words(text):\n", "def main():\n", "class Reader:\n", "def merge(left, right):\n"];
  const one = async (number) => {
    for (let turn = 0; !signal.aborted; turn++) {
      const prompt = shared[number % 5 ? 0 : 1] + ends[(number + turn) % ends.length] + "    # " + "detail ".repeat(((number * 7 + turn * 3) % 9) * 4);
      const body = { prompt, max_tokens: 40 + ((number * 37 + turn * 53) % 120), temperature: 0.8, n: number % 6 === 3 ? 3 : 1, ignore_eos: true };
      const headers = { "Content-Type": "application/json", Authorization: `Bearer ${API_KEY}` };
      await fetch(`${base}/v1/completions`, { method: "POST", headers, body: JSON.stringify(body), signal }).then((answer) => answer.text()).catch(() => {});
    }
  };
  return Promise.all(Array.from({ length: count }, (_, number) => one(number)));
}
