// Tour of OpenAI's client for Node: chat, completions, Responses, embeddings, tools, structured output, streams.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { BASE, EMBEDDING_BASE, MODEL, PROMPT, check, waitUntilIdle, write } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "system", content: "Write Python." }, { role: "user", content: PROMPT }];
const ask = { model: MODEL, messages, max_completion_tokens: 24, temperature: 0 };
const Forecast = z.object({ city: z.string().max(8), unit: z.enum(["C", "F"]), days: z.number().int().min(1).max(9) });
const lively = { ...ask, max_completion_tokens: 200, temperature: 1, seed: 3 };
let text = "";

await check("models.list and retrieve", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.deepEqual(ids, [MODEL]);
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
});

await check("chat.completions.create", async () => {
  const answer = await client.chat.completions.create(ask);
  text = answer.choices[0].message.content;
  assert.ok(text);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

await check("chat.completions.create: stream with usage", async () => {
  let streamed = "";
  let usage;
  const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) {
    streamed += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(streamed, text);
  assert.ok(usage.completion_tokens <= 24);
});

await check("chat.completions.stream: helper", async () => {
  const stream = client.chat.completions.stream(ask);
  assert.equal(await stream.finalContent(), text);
});

await check("chat.completions.create: withResponse and request id", async () => {
  const { data, response, request_id: id } = await client.chat.completions.create(ask).withResponse();
  assert.equal(data.choices[0].message.content, text);
  assert.equal(response.status, 200);
  assert.ok(id);
});

await check("chat.completions.create: an aborted stream ends its request", async () => {
  const stream = await client.chat.completions.create({
    ...ask, max_completion_tokens: 1500, ignore_eos: true, stream: true,
  });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break;
  }
  stream.controller.abort();
  await waitUntilIdle();
});

await check("chat.completions.parse: zodResponseFormat", async () => {
  const answer = await client.chat.completions.parse({ ...lively, response_format: zodResponseFormat(Forecast, "forecast") });
  Forecast.parse(answer.choices[0].message.parsed);
});

await check("chat.completions.parse: zodFunction, named", async () => {
  const tools = [zodFunction({ name: "forecast", parameters: Forecast })];
  const tool_choice = { type: "function", function: { name: "forecast" } };
  const answer = await client.chat.completions.parse({ ...lively, tools, tool_choice });
  Forecast.parse(answer.choices[0].message.tool_calls[0].function.parsed_arguments);
});

await check("chat.completions.runTools: a forced call, its result sent back", async () => {
  const called = [];
  const tool = {
    type: "function",
    function: {
      name: "forecast", description: "Weather.", parse: JSON.parse,
      parameters: { ...z.toJSONSchema(Forecast), $schema: undefined },
      function: (given) => {
        called.push(Forecast.parse(given));
        return "4 C";
      },
    },
  };
  const tool_choice = { type: "function", function: { name: "forecast" } };
  const runner = client.chat.completions.runTools({ ...lively, tools: [tool], tool_choice });
  await runner.done();
  assert.equal(called.length, 1);
});

await check("chat.completions.create: errors have their kind and field", async () => {
  await assert.rejects(client.chat.completions.create({ ...ask, temperature: -1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(client.models.retrieve("nobody"), OpenAI.NotFoundError);
});

await check("completions.create, whole and streamed", async () => {
  const asked = { model: MODEL, prompt: PROMPT, max_tokens: 24, temperature: 0 };
  const whole = (await client.completions.create(asked)).choices[0].text;
  let streamed = "";
  for await (const chunk of await client.completions.create({ ...asked, stream: true })) {
    streamed += chunk.choices[0].text;
  }
  assert.equal(streamed, whole);
});

const respond = { model: MODEL, input: PROMPT, max_output_tokens: 24, temperature: 0 };

await check("responses.create, stream, retrieve, previous_response_id, delete", async () => {
  const first = await client.responses.create(respond);
  assert.ok(first.output_text);
  assert.equal((await client.responses.retrieve(first.id)).output_text, first.output_text);
  let streamed = "";
  for await (const event of await client.responses.create({ ...respond, stream: true })) {
    if (event.type === "response.output_text.delta") streamed += event.delta;
  }
  assert.equal(streamed, first.output_text);
  const second = await client.responses.create({ ...respond, input: "again", previous_response_id: first.id });
  assert.equal(second.previous_response_id, first.id);
  await client.responses.delete(first.id);
  await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
});

await check("responses.create: background and cancel", async () => {
  const running = await client.responses.create({
    ...respond, max_output_tokens: 1500, ignore_eos: true, background: true,
  });
  assert.equal((await client.responses.cancel(running.id)).status, "cancelled");
  await waitUntilIdle();
});

await check("responses.parse: zodTextFormat", async () => {
  const asked = { ...respond, max_output_tokens: 200, temperature: 1, seed: 3 };
  const made = await client.responses.parse({ ...asked, text: { format: zodTextFormat(Forecast, "forecast") } });
  Forecast.parse(made.output_parsed);
});

await check("responses.stream: a named function", async () => {
  const { $schema, ...parameters } = z.toJSONSchema(Forecast);
  assert.ok($schema);
  const stream = client.responses.stream({
    ...respond, max_output_tokens: 200, temperature: 1, seed: 3, tool_choice: { type: "function", name: "forecast" },
    tools: [{ type: "function", name: "forecast", strict: true, parameters }],
  });
  const final = await stream.finalResponse();
  Forecast.parse(JSON.parse(final.output.at(-1).arguments));
});

await check("embeddings.create: base64 (the default) equals float", async () => {
  const embedder = new OpenAI({ baseURL: `${EMBEDDING_BASE}/v1`, apiKey: "none", maxRetries: 0 });
  const coded = await embedder.embeddings.create({ model: MODEL, input: [PROMPT, "x"] });
  const plain = await embedder.embeddings.create({ model: MODEL, input: [PROMPT, "x"], encoding_format: "float" });
  assert.deepEqual(coded.data.map((data) => data.embedding.length), [256, 256]);
  coded.data.forEach((data, row) => {
    data.embedding.forEach((value, at) => assert.ok(Math.abs(value - plain.data[row].embedding[at]) < 1e-6));
  });
});

write();
