// The Node clients of OpenAI and Anthropic against a gateway: `NODE_PATH=... node clients.cjs <url of the gateway>`.
// It ends with an error where an answer is not as it must be; tests/e2e/test_node_clients.py runs it.
"use strict";

const assert = require("node:assert/strict");
const OpenAI = require("openai");
const Anthropic = require("@anthropic-ai/sdk");

const url = process.argv[2];
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const chat = { model: "demo", messages: [{ role: "user", content: "hello" }] };
const said = { model: "demo", max_tokens: 4, messages: [{ role: "user", content: "hello" }] };

async function openaiAnswers() {
  const whole = (await openai.chat.completions.create(chat)).choices[0].message.content;
  let text = "";
  for await (const chunk of await openai.chat.completions.create({ ...chat, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  assert.equal(text, whole);
  assert.ok(whole.length > 0);
  const tools = [{ type: "function", function: { name: "look", parameters: { type: "object" } } }];
  const called = await openai.chat.completions.create({ ...chat, tools, tool_choice: "required" });
  assert.equal(called.choices[0].message.tool_calls[0].function.name, "look");
  assert.equal((await openai.embeddings.create({ model: "demo", input: ["a", "b"] })).data.length, 2);
}

async function openaiGoesOn() {
  const first = await openai.responses.create({ model: "demo", input: "hello" });
  const second = await openai.responses.create({ model: "demo", input: "go on", previous_response_id: first.id });
  assert.equal(second.previous_response_id, first.id);
  assert.ok(second.usage.input_tokens > first.usage.input_tokens);
  assert.equal((await openai.responses.retrieve(second.id)).id, second.id);
  await openai.responses.delete(second.id);
  await assert.rejects(openai.responses.retrieve(second.id), OpenAI.NotFoundError);
}

async function openaiFails() {
  await assert.rejects(openai.chat.completions.create({ ...chat, model: "nope" }), OpenAI.NotFoundError);
  const stream = await openai.chat.completions.create({ ...chat, stream: true });
  for await (const _ of stream) {
    stream.controller.abort();
    break;
  }
}

async function anthropicAnswers() {
  const whole = (await anthropic.messages.create({ ...said, system: "be short" })).content[0].text;
  const stream = anthropic.messages.stream(said);
  assert.equal(await stream.finalText(), whole);
  await assert.rejects(anthropic.messages.create({ ...said, model: "nope" }), Anthropic.NotFoundError);
}

(async () => {
  for (const each of [openaiAnswers, openaiGoesOn, openaiFails, anthropicAnswers]) {
    await each();
    console.log(each.name);
  }
})();
