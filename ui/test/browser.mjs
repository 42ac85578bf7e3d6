// Tests the page in Chromium: node test/browser.mjs DEMO FAKE PLAIN [PICTURES]
//
// DEMO:  a server of the demo model, with the keys of open.mjs.
// FAKE:  a server without keys whose answers are `HOSTILE` (tests/serving/test_page_browser.py starts it).
// PLAIN: a server of a model without a chat template.
//
// Each check prints a line. The process ends with 1 if one fails.

import assert from "node:assert/strict";
import http from "node:http";
import { ADMIN_KEY, enterKeys, launch, load, open } from "./open.mjs";

const [demo, fake, plain, pictures] = process.argv.slice(2);
const browser = await launch();
let failures = 0;

async function check(name, base, options, body) {
  const opened = await open(browser, base, options);
  opened.page.setDefaultTimeout(60_000);
  try {
    await body(opened.page, opened.problems);
    assert.deepEqual(opened.problems, []);
    assert.deepEqual(await opened.page.evaluate(() => window.violations), [], "the policy was violated");
    console.log(`ok      ${name}`);
  } catch (error) {
    failures++;
    console.log(`FAILED  ${name}: ${error.stack}`);
  }
  if (pictures) await opened.page.screenshot({ path: `${pictures}/${name.replaceAll(" ", "_")}.png` });
  await opened.close();
}

const last = (page) => page.locator(".exchange").last();
const ended = (page, state = "done") => page.locator(`.exchange:last-child[data-state=${state}]`).waitFor();

async function send(page, text) {
  await page.locator("#draft").fill(text);
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector("#draft").value === ""); // the new exchange is shown too
}

async function completion(page, settings = {}) {
  await page.getByRole("button", { name: "Completion" }).click();
  for (const [name, value] of Object.entries({ temperature: "0.8", seed: "7", ...settings })) await page.locator(`#${name}`).fill(value);
}

async function inspect() {
  const answer = await fetch(`${demo}/admin/inspect`, { headers: { Authorization: `Bearer ${ADMIN_KEY}` } });
  return answer.json();
}

async function until(what, holds) {
  for (const end = Date.now() + 10_000; !(await holds()); await new Promise((later) => setTimeout(later, 50))) {
    assert.ok(Date.now() < end, `10 s without: ${what}`);
  }
}

// -- keys ------------------------------------------------------------------------------------------------------------

await check("keys are asked for and kept in memory", demo, {}, async (page) => {
  await page.getByText("needs an API key").waitFor();
  await page.locator("#api-key").fill("wrong");
  await page.getByRole("button", { name: "Done" }).click();
  await page.getByText("key refused").waitFor();
  await enterKeys(page);
  await page.locator(".served b").filter({ hasText: "demo" }).waitFor();
  const kept = await page.evaluate(() => [document.cookie, localStorage.length, sessionStorage.length, location.href]);
  assert.deepEqual(kept, ["", 0, 0, `${demo}/ui/`]);
  await page.reload();
  await page.getByText("needs an API key").waitFor(); // the reload has forgotten it
});

// -- chat ------------------------------------------------------------------------------------------------------------

await check("an answer streams", demo, {}, async (page) => {
  await enterKeys(page);
  await page.evaluate(() => {
    window.lengths = new Set();
    new MutationObserver(() => window.lengths.add(document.querySelector(".answer")?.textContent.length ?? 0)).observe(
      document.body, { childList: true, subtree: true, characterData: true },
    );
  });
  await completion(page, { max_tokens: "300" });
  await send(page, "def main():\n");
  await ended(page);
  assert.ok((await page.evaluate(() => window.lengths.size)) > 3, "the text came at once");
  assert.match(await last(page).locator("dl").innerText(), /tokens\s*\d+[\s\S]*first[\s\S]*perplexity/);
  await page.getByRole("button", { name: "Chat", exact: true }).click();
  await page.locator("#max_tokens").fill("20");
  for (const text of ["def main():", "and now?"]) {
    await send(page, text);
    await ended(page);
  }
  assert.equal(await page.locator(".exchange.chat").count(), 2);
  assert.equal(await page.evaluate(() => document.activeElement.id), "draft");
});

await check("suggestions suit the demo model", demo, {}, async (page) => {
  await enterKeys(page);
  await page.getByRole("button", { name: "def split_path(path):" }).click();
  assert.equal(await page.locator("#repetition_penalty").inputValue(), "1.15");
  await page.keyboard.press("Enter");
  await ended(page);
  assert.match(await last(page).innerText(), /os\.fspath\(path\)/);
});

await check("escape stops an answer", demo, {}, async (page) => {
  await enterKeys(page);
  await completion(page, { max_tokens: "450", temperature: "1.3" });
  await send(page, "def main():\n");
  await page.locator(".token").nth(3).waitFor({ state: "attached" });
  await page.keyboard.press("Escape");
  await ended(page, "stopped");
  await until("a free engine", async () => (await inspect()).running.length === 0);
  const tokens = await page.locator(".token").count();
  assert.ok(tokens > 3 && tokens < 450, `${tokens} tokens`);
  await page.getByRole("button", { name: "Retry" }).click();
  await page.locator(".token").nth(3).waitFor({ state: "attached" });
  await page.getByRole("button", { name: "Stop" }).click();
  await ended(page, "stopped");
});

await check("alternatives of a token", demo, {}, async (page) => {
  await enterKeys(page);
  await completion(page, { max_tokens: "24" });
  await send(page, "import json\n\ndef read_config(path):\n");
  await ended(page);
  assert.equal(await page.locator(".token").count(), 24);
  const word = await page.locator(".token").evaluateAll((all) => all.findIndex((token) => /[a-z]{2}/.test(token.textContent)));
  await page.locator(".token").nth(word).hover();
  const rows = page.locator(".alternatives tr");
  assert.ok((await rows.count()) >= 6); // five, and all others
  const shares = await rows.locator("td:last-child").allInnerTexts();
  const sum = shares.reduce((total, text) => total + (parseFloat(text.replace("<", "")) || 0), 0);
  assert.ok(Math.abs(sum - 100) < 1, shares.join(" "));
  assert.equal(await page.locator(".alternatives .chosen").count(), 1);
  await page.mouse.move(5, 300);
  await page.locator(".alternatives").waitFor({ state: "detached" });
  await page.locator(".tokens").focus();
  await page.keyboard.press("ArrowRight");
  assert.match(await page.locator(".alternatives p").innerText(), /token 1,/);
  await page.keyboard.press("ArrowRight");
  assert.match(await page.locator(".alternatives p").innerText(), /token 2,/);
  const colours = await page.locator(".token").evaluateAll((all) => new Set(all.map((token) => getComputedStyle(token).backgroundColor)).size);
  assert.ok(colours > 5, `${colours} colours`);
});

await check("errors are shown at their fields", demo, {}, async (page) => {
  await enterKeys(page);
  await page.locator("#max_tokens").fill("80");
  await page.locator("#structure").selectOption("json_schema");
  await page.locator("#structure-text").fill('{"type": "bogus"}');
  await page.locator("#draft").fill("A person, as JSON:");
  await page.locator("#draft").press("Enter");
  await page.locator("#structure-text-error").filter({ hasText: "Invalid type: bogus" }).waitFor(); // the server's words
  assert.equal(await page.locator("#draft").inputValue(), "A person, as JSON:");
  await page.locator("#structure-text").fill('{"type": ');
  await page.locator("#draft").press("Enter");
  await page.locator("#structure-text-error").filter({ hasText: "not JSON" }).waitFor();
  await page.locator("#structure").selectOption("regex");
  await page.locator("#structure-text").fill("(a");
  await page.locator("#draft").press("Enter");
  await page.locator("#structure-text-error").filter({ hasText: "unclosed group" }).waitFor();
  await page.locator("#structure").selectOption("none");
  await page.locator("#temperature").fill("-1");
  await page.locator("#draft").press("Enter");
  await page.locator(".number:has(#temperature) .field-error").filter({ hasText: "temperature" }).waitFor();
  assert.equal(await page.locator(".exchange").count(), 0);
});

await check("structured output", demo, {}, async (page) => {
  await enterKeys(page);
  await completion(page, { max_tokens: "120" });
  await page.getByRole("button", { name: "Text" }).click();
  await page.locator("#structure").selectOption("json_schema");
  await send(page, "A person, as JSON: ");
  await ended(page);
  assert.deepEqual(Object.keys(JSON.parse(await page.locator(".plain").innerText())).sort(), ["age", "name"]);
  await page.locator("#structure").selectOption("choice");
  await page.locator("#structure-text").fill("spades\nhearts");
  await send(page, "The suit is ");
  await ended(page);
  assert.match(await last(page).locator(".plain").innerText(), /^(spades|hearts)$/);
});

// -- hostile text ----------------------------------------------------------------------------------------------------

const TOOL = '[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]';

await check("hostile answers are inert", fake, {}, async (page) => {
  await send(page, "<img src=x onerror=alert(1)><script>alert(2)</script>");
  await ended(page);
  const answer = page.locator(".markdown");
  await answer.locator("h2").filter({ hasText: "A heading" }).waitFor();
  assert.equal(await answer.locator("table td").count(), 2);
  assert.match(await answer.locator("pre code").innerText(), /<b>code<\/b>/);
  assert.equal(await answer.locator("script, img, svg, iframe, style, form, input, object, math, link, meta, base").count(), 0);
  const links = await answer.locator("a").evaluateAll((all) => all.map((link) => [link.getAttribute("href"), link.rel, link.target]));
  const safe = links.filter(([href]) => href !== null);
  assert.deepEqual(safe.map(([href]) => new URL(href).protocol).filter((protocol) => !/^https?:$/.test(protocol)), []);
  assert.equal(safe.length, 3); // two links, and the image as a link
  assert.ok(safe.every(([, rel, target]) => rel.includes("noopener") && rel.includes("noreferrer") && target === "_blank"));
  const attributes = await answer.locator("*").evaluateAll((all) => all.flatMap((one) => one.getAttributeNames()));
  assert.deepEqual([...new Set(attributes)].filter((name) => !["href", "rel", "target", "title", "align"].includes(name)), []);
  assert.match(await answer.innerText(), /<script>alert/); // visible as text
  assert.equal(await page.evaluate(() => window.hacked), undefined);
  await page.getByRole("button", { name: "Tokens" }).click();
  await page.locator(".token").first().waitFor();
  assert.equal(await page.locator(".answer").locator("script, img, svg, iframe").count(), 0);
});

await check("reasoning and tool calls are folded", fake, {}, async (page) => {
  await page.locator("#tools").fill(TOOL);
  await page.getByLabel("Token probabilities").uncheck();
  await send(page, "look");
  await ended(page);
  const folds = page.locator("details.fold");
  assert.equal(await folds.count(), 2);
  assert.deepEqual(await folds.evaluateAll((all) => all.map((one) => one.open)), [false, false]);
  await folds.first().locator("summary").click();
  assert.match(await folds.first().locator("p").innerText(), /<img src=x onerror/);
  assert.match(await folds.last().locator("summary").innerText(), /look/);
  await folds.last().locator("summary").click();
  assert.deepEqual(JSON.parse(await folds.last().locator("pre").innerText()), { q: "<b>x</b>" });
});

await check("a hostile name of a model is text", fake, {}, async (page) => {
  assert.match(await page.locator(".served b").innerText(), /^<img/);
  assert.equal(await page.locator("#model option").count(), 2);
  assert.equal(await page.locator("img").count(), 0);
});

await check("the policy stops scripts and other hosts", fake, {}, async (page, problems) => {
  const tried = await page.evaluate(async (other) => {
    const element = document.createElement("div");
    const results = {};
    try {
      element.innerHTML = "<b>x</b>";
      results.html = "written";
    } catch (error) {
      results.html = error.name;
    }
    results.fetch = await fetch(other).then(() => "fetched", (error) => error.name);
    const script = document.createElement("script");
    try {
      script.textContent = "window.hacked = 1";
      document.body.append(script);
    } catch {
      // the policy refuses the text itself
    }
    await new Promise((later) => setTimeout(later, 300));
    const seen = window.violations.length;
    window.violations.length = 0; // asked for
    return { ...results, hacked: window.hacked, seen };
  }, "http://localhost:9/");
  assert.equal(tried.html, "TypeError");
  assert.equal(tried.fetch, "TypeError");
  assert.equal(tried.hacked, undefined);
  assert.ok(tried.seen >= 3, JSON.stringify(tried));
  assert.ok(problems.length >= 3);
  problems.length = 0; // asked for
});

await check("a model without a chat template completes prompts", plain, {}, async (page) => {
  await page.locator("#draft").fill("say this");
  await page.locator("#draft").press("Enter");
  await page.getByRole("button", { name: "Completion", pressed: true }).waitFor();
  assert.match(await page.locator(".refusal").innerText(), /no chat template/);
  await page.locator("#draft").press("Enter");
  await ended(page);
  assert.match(await page.locator(".answer").innerText(), /say this/);
});

// -- engine ----------------------------------------------------------------------------------------------------------

await check("without an admin key the view says what to do", fake, { hash: "#engine" }, async (page) => {
  await page.getByText("--admin-key KEY").waitFor();
});

for (const dark of [false, true]) {
  await check(`the engine is shown ${dark ? "in the dark" : "in light"}`, demo, { hash: "#engine", dark }, async (page) => {
    await page.getByText("needs an admin key").waitFor();
    await enterKeys(page);
    const control = new AbortController();
    const done = load(demo, 10, control.signal);
    try {
      await page.waitForFunction(() => document.querySelectorAll(".batch tbody tr").length > 3);
      await page.waitForFunction(() => Number(document.querySelector(".map canvas").dataset.blocks) > 20);
      await page.waitForFunction(() => parseFloat(document.querySelector(".figures b").textContent) > 0);
      const coloured = await page.locator(".map canvas").evaluate((canvas) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const hues = new Set();
        for (let i = 0; i < data.length; i += 4) {
          const [r, g, b] = data.subarray(i, i + 3);
          if (Math.max(r, g, b) - Math.min(r, g, b) > 60) hues.add(`${r} ${g} ${b}`);
        }
        return hues.size;
      });
      assert.ok(coloured >= 4, `${coloured} colours in the map`);
      assert.match(await page.locator(".map .legend").innerText(), /shared\s*[1-9]/);
      await page.locator(".map canvas").hover({ position: { x: 12, y: 12 } });
      assert.match(await page.locator(".tip").innerText(), /^block 0/);
      await page.locator(".steps canvas").hover({ position: { x: 64, y: 40 } });
      assert.match(await page.locator(".tip").innerText(), /^step [\d,]+: [\s\S]*rows/);
      await page.locator(".batch tbody tr").first().hover();
    } finally {
      control.abort();
      await done;
    }
    await page.getByText("No request runs.").waitFor();
  });
}

// -- where it is shown -----------------------------------------------------------------------------------------------

for (const hash of ["", "#engine"]) {
  await check(`a phone shows ${hash || "#chat"}`, demo, { width: 390, height: 780, hash }, async (page) => {
    await enterKeys(page);
    if (hash) await page.locator(".map canvas").waitFor();
    else {
      await page.getByRole("button", { name: "Settings" }).click();
      await page.locator("#max_tokens").fill("30");
      await page.getByRole("button", { name: "Settings" }).click();
      await send(page, "def main():");
      await ended(page);
    }
    const over = await page.evaluate(() => document.scrollingElement.scrollWidth - innerWidth);
    assert.ok(over <= 0, `${over} pixels too wide`);
  });
}

// A proxy that takes a prefix away, as with --root-path.
const PREFIX = "/deep/model";
const proxy = http.createServer((request, response) => {
  if (!request.url.startsWith(PREFIX)) return response.writeHead(404).end();
  const { port } = new URL(fake);
  const options = { host: "127.0.0.1", port, path: request.url.slice(PREFIX.length), method: request.method, headers: request.headers };
  request.pipe(http.request(options, (answer) => answer.pipe(response.writeHead(answer.statusCode, answer.headers))));
});
await new Promise((listening) => proxy.listen(0, "127.0.0.1", listening));
await check("below a prefix", `http://127.0.0.1:${proxy.address().port}${PREFIX}`, {}, async (page) => {
  assert.match(page.url(), /\/deep\/model\/ui\/$/);
  await page.locator(".dot.good").waitFor();
  await page.getByLabel("Token probabilities").uncheck();
  await send(page, "hello");
  await ended(page);
});
proxy.close();
proxy.closeAllConnections();

await browser.close();
console.log(failures ? `${failures} failed` : "all passed");
process.exit(failures ? 1 : 0);
