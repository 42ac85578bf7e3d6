// Tour of Vercel's `ai` with @ai-sdk/openai-compatible and @ai-sdk/openai (chat and Responses).

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";
import { BASE, EMBEDDING_BASE, MODEL, PROMPT, check, waitUntilIdle, write } from "./checks.mjs";

const compatible = createOpenAICompatible({
  name: "jpaged", baseURL: `${BASE}/v1`, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true,
});
const openai = createOpenAI({ baseURL: `${BASE}/v1`, apiKey: "none" });
const models = {
  "openai-compatible": compatible(MODEL), "openai.chat": openai.chat(MODEL), "openai.responses": openai.responses(MODEL),
};
// Without it the demo model calls until the limit of tokens, and the SDK runs no tool of an answer that was cut off.
const oneCall = { jpaged: { parallel_tool_calls: false }, openai: { parallelToolCalls: false } };
const Forecast = z.object({ city: z.string().max(8), unit: z.enum(["C", "F"]) });

async function tour(name, model) {
  const ask = { model, system: "Write Python.", prompt: PROMPT, maxOutputTokens: 24, temperature: 0, maxRetries: 0 };
  const lively = { ...ask, maxOutputTokens: 200, temperature: 1 };
  let text = "";

  await check(`${name}: generateText, with usage`, async () => {
    const made = await generateText(ask);
    text = made.text;
    assert.ok(text);
    assert.ok(made.usage.outputTokens > 0 && made.usage.outputTokens <= 24);
    assert.ok(made.usage.inputTokens > 0);
  });

  await check(`${name}: streamText equals generateText, with usage`, async () => {
    const stream = streamText({ ...ask, onError: ({ error }) => { throw error; } });
    let streamed = "";
    for await (const part of stream.textStream) streamed += part;
    assert.equal(streamed, text);
    assert.ok((await stream.usage).outputTokens > 0);
  });

  await check(`${name}: an aborted stream ends its request`, async () => {
    const controller = new AbortController();
    const stream = streamText({ ...ask, maxOutputTokens: 1500, temperature: 1, abortSignal: controller.signal });
    for await (const part of stream.textStream) {
      assert.equal(typeof part, "string");
      controller.abort();
    }
    await waitUntilIdle();
  });

  await check(`${name}: structured output`, async () => {
    const made = await generateText({ ...lively, output: Output.object({ schema: Forecast }) });
    Forecast.parse(made.output);
  });

  await check(`${name}: structured output, streamed`, async () => {
    const stream = streamText({ ...lively, output: Output.object({ schema: Forecast }) });
    let parts = 0;
    for await (const part of stream.partialOutputStream) parts += part !== undefined;
    assert.ok(parts > 0);
    Forecast.parse(await stream.output);
  });

  const called = [];
  const tools = {
    forecast: tool({
      description: "Weather.", inputSchema: Forecast,
      execute: async (given) => {
        called.push(given);
        return "4 C";
      },
    }),
  };
  for (const toolChoice of ["required", { type: "tool", toolName: "forecast" }]) {
    const kind = typeof toolChoice === "string" ? toolChoice : "named";
    await check(`${name}: tools, ${kind}, two steps`, async () => {
      called.length = 0;
      const made = await generateText({
        ...lively, tools, toolChoice, stopWhen: isStepCount(2), providerOptions: oneCall,
        prepareStep: ({ stepNumber }) => (stepNumber === 1 ? { toolChoice: "none" } : {}),
      });
      assert.equal(called.length, 1);
      Forecast.parse(called[0]);
      // A named call ends with "stop", as in OpenAI's API; the second step runs after the result of the call.
      assert.equal(made.steps.length, 2);
    });
  }

  await check(`${name}: tools, named, streamed`, async () => {
    called.length = 0;
    const stream = streamText({ ...lively, tools, toolChoice: { type: "tool", toolName: "forecast" } });
    for await (const part of stream.fullStream) if (part.type === "error") throw part.error;
    assert.equal(called.length, 1);
  });

  await check(`${name}: an error has its status and message`, async () => {
    await assert.rejects(generateText({ ...ask, temperature: -1 }), (error) => {
      assert.equal(error.statusCode, 400);
      assert.match(error.message, /temperature/);
      return true;
    });
  });
}

for (const [name, model] of Object.entries(models)) await tour(name, model);

await check("openai-compatible: completionModel", async () => {
  const ask = { model: compatible.completionModel(MODEL), prompt: PROMPT, maxOutputTokens: 24, temperature: 0 };
  const { text } = await generateText(ask);
  assert.ok(text);
  let streamed = "";
  for await (const part of streamText(ask).textStream) streamed += part;
  assert.equal(streamed, text);
});

for (const [name, made] of Object.entries({
  "openai-compatible": createOpenAICompatible({ name: "jpaged", baseURL: `${EMBEDDING_BASE}/v1`, apiKey: "none" }),
  openai: createOpenAI({ baseURL: `${EMBEDDING_BASE}/v1`, apiKey: "none" }),
})) {
  await check(`${name}: embedMany`, async () => {
    const { embeddings } = await embedMany({ model: made.embeddingModel(MODEL), values: [PROMPT, "x"] });
    assert.deepEqual(embeddings.map((row) => row.length), [256, 256]);
  });
}

write();
