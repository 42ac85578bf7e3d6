// Takes the pictures of docs/ui.md from a server of the demo model under load:
//
//   jpaged serve demo --api-key talk --admin-key look --max-num-seqs 16 --max-num-batched-tokens 128 \
//     --kv-cache-memory-bytes 12582912
//   npm run pictures -- http://127.0.0.1:8000 ../docs

import { enterKeys, launch, load, open } from "./open.mjs";

const [base, folder] = process.argv.slice(2);
const browser = await launch();

const chat = await open(browser, base, { width: 1180, height: 780, scale: 1.5 });
await enterKeys(chat.page);
await chat.page.getByRole("button", { name: "Completion" }).click();
await chat.page.locator("#temperature").fill("0.7");
await chat.page.locator("#seed").fill("11");
const say = async (prompt) => {
  await chat.page.locator("#draft").fill(prompt);
  await chat.page.keyboard.press("Enter");
  await chat.page.locator(".exchange").last().locator(".actions").waitFor({ timeout: 120_000 });
};
await chat.page.locator("#structure").selectOption("json_schema");
await say("# The first record of the file:\nrecord = ");
await chat.page.locator("#structure").selectOption("none");
await chat.page.locator("#max_tokens").fill("96");
await say("class Queue:\n    def __init__(self, limit):\n");
await chat.page.locator("#structure").selectOption("json_schema"); // show the editor of the first answer
// A word that the model was unsure of.
const unsure = await chat.page.locator(".exchange").last().locator(".token").evaluateAll((all) =>
  all.findIndex((token, i) => i > 5 && /^\s?[a-z]{3,}/.test(token.textContent) && token.style.getPropertyValue("--p") < 0.5));
await chat.page.locator(".exchange").last().locator(".token").nth(unsure).hover();
await chat.page.waitForTimeout(200);
await chat.page.screenshot({ path: `${folder}/ui_chat.png` });

for (const [name, dark] of [["ui_engine", false], ["ui_engine_dark", true]]) {
  const control = new AbortController();
  const done = load(base, 20, control.signal);
  const engine = await open(browser, base, { width: 1280, height: 965, scale: 1.5, dark, hash: "#engine" });
  await enterKeys(engine.page);
  await engine.page.waitForTimeout(16_000);
  await engine.page.screenshot({ path: `${folder}/${name}.png` });
  control.abort();
  await done;
  console.log(name, engine.problems);
  await engine.close();
}
console.log("chat", chat.problems, await chat.page.evaluate(() => window.violations));
await browser.close();
